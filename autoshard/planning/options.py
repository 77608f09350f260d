"""Options of a planning request, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict, get_args

from autoshard.cost.machine.device import load_device
from autoshard.mesh import Mesh, Spec, as_spec, parse_spec
from autoshard.plans.value import Keep

Hint = Spec | Sequence[Sequence[str] | str | None] | str
Progress = Callable[[str], None]
Confirm = Literal["never", "auto", "always"]
"""Whether the target's compiler is asked if a plan fits (`confirm.py`)."""
RematOption = Literal["as-is", "auto", "none", "products", "full"]
"""What is recomputed: as the program's checkpoints say, as planned (`remat.py`), or the same of every block."""
DEVICE_MEMORY: Literal["device"] = "device"
"""Default of `memory`: what the runtime leaves of the device kind's (`Device.memory_limit`)."""


def silent(stage: str) -> None:
    """Ignore progress."""


class OptionKeywords(TypedDict, total=False):
    """The fields of `PlanningOptions` as keywords; `hints` in any form that users write."""

    memory: float | Literal["device"] | None
    hints: Mapping[str, Hint] | None
    keep: Keep
    fold: bool
    time_limit: float
    seed: int
    backend: str
    annotations: Literal["all", "least"]
    refine: str | None
    confirm: Confirm
    rivals: bool
    dump_problem: str | Path | None
    progress: Progress | None


@dataclass(frozen=True)
class PlanningOptions:
    """Options of a planning request; `autoshard.plan` explains each field.

    Attributes:
        fold: has no effect.
        rivals: also predict the plans by hand estimated best, and take a faster one (`rivals.py`).

    Raises:
        ValueError: an option is invalid; names it.
    """

    memory: float | Literal["device"] | None = DEVICE_MEMORY
    hints: Mapping[str, Spec] = field(default_factory=dict)
    keep: Keep = "all"
    fold: bool = True
    time_limit: float = 60.0
    seed: int = 0
    backend: str = "auto"
    annotations: Literal["all", "least"] = "all"
    refine: str | None = None
    confirm: Confirm = "never"
    rivals: bool = True
    dump_problem: str | Path | None = None
    progress: Progress = silent

    def __post_init__(self) -> None:
        """Validate every field, and normalise hints."""
        object.__setattr__(self, "hints", _hints(self.hints))
        if self.progress is None:
            object.__setattr__(self, "progress", silent)
        if not isinstance(self.time_limit, int | float) or not self.time_limit > 0:
            raise ValueError(f"time_limit={self.time_limit!r}: a positive number of seconds is needed")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r}: a whole number is needed")
        if self.annotations not in ("all", "least"):
            raise ValueError(f"annotations are all or least, not {self.annotations!r}")
        if self.keep not in get_args(Keep):
            raise ValueError(f"keep is {', '.join(get_args(Keep))}, not {self.keep!r}")
        if self.confirm not in get_args(Confirm):
            raise ValueError(f"confirm is {', '.join(get_args(Confirm))}, not {self.confirm!r}")

    def memory_on(self, mesh: Mesh) -> int | None:
        """Memory limit on `mesh` in bytes per device; None is no limit.

        Raises:
            ValueError: `memory` is no number of bytes.
        """
        memory = self.memory
        if memory == DEVICE_MEMORY:
            return load_device(mesh.device).memory_limit
        if memory is None:
            return None
        if not isinstance(memory, int | float) or not math.isfinite(memory):
            raise ValueError(f"memory={memory!r}: a number of bytes per device is needed; None for no limit")
        if memory <= 0:
            raise ValueError(f"memory={memory}: bytes per device must be positive")
        return int(memory)


def _hints(hints: Mapping[str, Hint] | None) -> dict[str, Spec]:
    if hints is None:
        return {}
    if not isinstance(hints, Mapping) or not all(isinstance(name, str) for name in hints):
        raise ValueError("hints are a dict from names of tensors to specs, such as {'wte.weight': '[model],[]'}")
    return {name: _hint(name, hint) for name, hint in sorted(hints.items())}


def _hint(name: str, hint: Hint) -> Spec:
    try:
        return parse_spec(hint) if isinstance(hint, str) else as_spec(hint)
    except (ValueError, TypeError) as error:
        raise ValueError(f"hint for {name}: {error}") from error
