"""The figures that a plan records: prediction, bound and gap of the solver, mesh shapes tried.

Bytes are per device, times are seconds of one step. Floats keep nine significant digits, so that a plan is equal to
itself read back, and the same call gives the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from autoshard.errors import AutoshardError
from autoshard.mesh import AxisGroup

SIGNIFICANT_DIGITS = 9


class PlanError(AutoshardError, ValueError):
    """A plan that is malformed, contradicts itself, or cannot be written."""


def _rounded(number: float) -> float:
    return float(f"{number:.{SIGNIFICANT_DIGITS}g}")


class _Figures:
    """Rounds the float fields of a frozen dataclass when it is made; refuses figures that are not finite."""

    def __post_init__(self) -> None:
        """Round and check."""
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, float) or (isinstance(value, int) and each.type in ("float", "float | None")):
                if not math.isfinite(value):
                    raise PlanError(f"{type(self).__name__}.{each.name} is {value}; a plan holds finite figures only")
                object.__setattr__(self, each.name, _rounded(value))


@dataclass(frozen=True)
class CollectiveTotal(_Figures):
    """All collectives of one kind over the same axes: how many run in a step, and their bytes together, per device.

    Bytes of one collective are the larger of operand and result payload.
    """

    kind: str
    axes: AxisGroup
    count: int
    bytes: int


@dataclass(frozen=True)
class ModuleCost(_Figures):
    """One module's part of a step in one phase, without its submodules.

    Attributes:
        module: its path, `""` for ops of no module.
        phase: `forward`, `backward` or `optimizer`; `""` for reshards of its parameters before any op reads them, and
            where the phase is unknown.
        compute_s, communication_s: seconds of its kernels (a kernel counts where its last op is) and collectives.
        collectives: totals, per kind and axes.
    """

    module: str
    phase: str
    compute_s: float
    communication_s: float
    collectives: tuple[CollectiveTotal, ...] = ()


@dataclass(frozen=True)
class Predicted(_Figures):
    """Prediction of the cost model for one step.

    Attributes:
        step_time_s: serial step time: compute plus communication, in seconds.
        compute_s, communication_s: its two parts.
        overlapped_s: step time when collectives run beside kernels (`cost/overlap.py`).
        mfu: useful FLOP (every op counted once over the whole mesh, recomputation not) / (step time x peak FLOP/s of
            all devices).
        collectives: totals, per kind and axes.
        peak_memory_bytes: per device.
        modules: compute and communication per module and phase, in program order; empty where not computed.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    mfu: float
    collectives: tuple[CollectiveTotal, ...]
    peak_memory_bytes: int
    modules: tuple[ModuleCost, ...] = field(default=(), repr=False)


BY_HAND = "by hand"
"""Backend of a plan by hand where the solver found none."""


@dataclass(frozen=True)
class SolverInfo(_Figures):
    """Outcome of the solver.

    Attributes:
        status: `optimal`, `feasible`, `time_limit` or `interrupted`.
        objective: of the plan, in seconds.
        bound: proven lower bound on the objective, in seconds; None when none is known.
        gap: (objective - bound) / objective; None when no bound is known.
        backend: what found the choice.
        overruled: the plan by hand that replaced the solver's choice, because it is predicted no slower (`rivals.py`);
            the other figures are of the choice. With `BY_HAND` as the backend the solver found none that fits: the
            objective is the predicted step of the plan by hand, the bound that of the problem without a limit.
    """

    status: str
    objective: float
    bound: float | None
    gap: float | None
    backend: str
    overruled: str | None = None

    def __post_init__(self) -> None:
        """Turn an infinite bound into None."""
        if self.bound is None or not math.isfinite(self.bound):
            object.__setattr__(self, "bound", None)
            object.__setattr__(self, "gap", None)
        super().__post_init__()


@dataclass(frozen=True)
class ReplicatedOp(_Figures):
    """An op that is replicated for want of a sharding rule.

    Attributes:
        op: its StableHLO kind, or a custom call's target.
        module: path of its module.
        reason: why, for a person.
        cost_s: seconds of a step, replicated.
    """

    op: str
    module: str
    reason: str
    cost_s: float


@dataclass(frozen=True)
class MeshTried(_Figures):
    """Outcome of one mesh shape, where all shapes of a number of devices were tried.

    Attributes:
        shape: of the mesh.
        outcome: `planned`; `pruned`, where `bound` proves that it has no better plan than another; `same`, where it is
            another up to the names of its axes; `no plan`, where memory limit or hints are infeasible.
        step_time_s: predicted of its plan.
        objective, bound: of the solver, in seconds; None where unknown.
        peak_memory_bytes: predicted, per device.
        note: for a person.
    """

    shape: tuple[int, ...]
    outcome: str
    step_time_s: float | None = None
    objective: float | None = None
    bound: float | None = None
    peak_memory_bytes: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Turn an infinite bound into None."""
        if self.bound is not None and not math.isfinite(self.bound):
            object.__setattr__(self, "bound", None)
        super().__post_init__()


@dataclass(frozen=True)
class Confirmation(_Figures):
    """What the target's compiler says of the memory that a plan takes.

    Attributes:
        verdict: `fits`, as compiled within the memory limit; or `not confirmed`.
        target: that it was compiled for; empty where there is none.
        compiler: package and version, such as `libtpu 0.0.51`; empty where it is not installed.
        compiled_bytes: of the plan, per device; None where it was not compiled.
        compiles: plans compiled, those that did not fit among them.
        seconds: that compiling took.
        note: why it is not confirmed.
    """

    verdict: str
    target: str = ""
    compiler: str = ""
    compiled_bytes: int | None = None
    compiles: int = 0
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class RematTried(_Figures):
    """One choice of what is recomputed that was planned (`planning/remat.py`).

    Attributes:
        remat: value of the capture switch `remat:…`.
        outcome: `planned`; `too large`, without a memory limit; `pruned`, the solver's bound is above the best;
            `no plan` within the limit.
        step_time_s, peak_memory_bytes: as predicted, where there is a plan.
    """

    remat: str
    outcome: str
    step_time_s: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class RematSearch(_Figures):
    """How it was chosen what is recomputed.

    Attributes:
        chosen: value of the capture switch `remat:…`.
        bound: lower bound of the solver's objective, in seconds, over all that may be recomputed or kept.
        gap: between that bound and the objective of the plan, as a fraction of the objective.
    """

    chosen: str
    tried: tuple[RematTried, ...]
    bound: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class RefineCandidate(_Figures):
    """One plan that was compiled to refine a choice (`refine.py`).

    Attributes:
        name: `optimum` for the predicted choice; the constraint of a runner-up, `overlapped`, or a plan by hand.
        predicted_s, predicted_overlapped_s: its step time, serial, and overlapped.
        compiled_s, compiled_overlapped_s: of the compiled program under the device model, serial, and as scheduled;
            None where it was not compiled.
        peak_memory_bytes: as compiled, per device.
        note: why it is not eligible; empty where it is.
    """

    name: str
    predicted_s: float
    predicted_overlapped_s: float
    compiled_s: float | None = None
    compiled_overlapped_s: float | None = None
    peak_memory_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Refinement:
    """The candidates that were compiled to refine a choice, and the one taken.

    Attributes:
        target: that the candidates were compiled for.
        chosen: name of the candidate that the plan is.
        candidates: all that were compiled, the predicted choice first.
    """

    target: str
    chosen: str
    candidates: tuple[RefineCandidate, ...]
