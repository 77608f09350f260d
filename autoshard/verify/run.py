"""`verify --run`: three training steps under a plan on virtual CPU devices, against the same steps on one device.

**Tolerances.** Losses 1e-5 relative; gradients of the first step, buffers after the last one and outputs of a
forward-only plan 1e-5 of the tensor's largest element; parameters after the last step 1e-5 under SGD (AdamW divides by
tiny second moments: reported, not judged). 2e-2 for programs in half precision.

**The reference** is PyTorch in float64, on its own CPU kernels, in eager mode, without torch_xla, capture switches, or
shardings (in float32 where a model mixes in float32 tensors of its own). The runs share only weights, batches and the
model's code. A program with random numbers (dropout) is compared with torch_xla without shardings, from the same seed:
XLA's numbers do not depend on the sharding, PyTorch's kernels draw others. So are gradients and parameters in half
precision that differ from PyTorch's, whose kernels accumulate in float32 where XLA's for CPUs do in bf16.

**The captured program** runs one step on one device, by XLA alone (`verify/captured.py`); a difference from PyTorch's
results, parameters, buffers or states (`verify/eager.py`) is a fault of capture. Not with random numbers.

**Excuses.** An error above the tolerance, of at most `MAX_EXCUSED` of the tensor's largest value, is excused and named
with its cause: where PyTorch's float32 error is above it too (`rounding.py`), or the unsplit program's is and the
tensor depends on an op that explains it (`CAUSES`). Where PyTorch's float32 error exceeds `MAX_EXCUSED` the tensor is
undecided. With an undecided tensor, or more than `MAX_EXCUSED_SHARE` excused, the run is *not decided*. All runs share
one new process with the mesh's number of virtual devices.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard import files, workers
from autoshard.errors import AutoshardError
from autoshard.plans.json_format import save
from autoshard.plans.value import OpSignature, Plan
from autoshard.program import Program
from autoshard.sources import Source

TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2
"""Tolerance where the program holds bf16 or f16 values."""
RUN_TIMEOUT_S = 1800.0
MAX_EXCUSED = 1e-3
"""Largest error that can be excused, as a fraction of a tensor's largest value."""
MAX_EXCUSED_SHARE = 0.05
"""Largest fraction of the compared tensors that may be excused."""
CAUSES = {
    "near-ties, which PyTorch and XLA may break otherwise": ("topk", "sort", "argmax", "argmin", "max_pool", "median"),
    "sums of a batch norm": ("native_batch_norm", "batch_norm", "var_mean"),
}
"""Causes of differences between XLA and PyTorch: words in names of the ops that a tensor depends on."""
RANDOM_OP_NAMES = ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial", "exponential")
FASTER_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Three times faster, the same partitioned program."""


class RunError(AutoshardError, RuntimeError):
    """The comparison could not run: why, and what to do."""


@dataclass(frozen=True)
class Difference:
    """The largest difference among some tensors, and its tensor (`""` for none)."""

    value: float
    where: str = ""


@dataclass(frozen=True)
class RunReport:
    """Results under the plan against those on one device.

    Attributes:
        devices: virtual devices of the run under the plan.
        optimizer: class of the optimizer, or None for a plan without one.
        losses, reference_losses: per step, under the plan and on one device.
        loss: largest difference of a loss, relative.
        gradients: of the first step, relative to the largest element of each tensor.
        parameters: after the last step, absolute; judged for SGD only.
        outputs: of a forward-only plan, relative to the largest element of each tensor.
        tolerance: of the judged differences.
        compiled_once: whether the steps after the first reused its compiled program.
        reference: what the results are compared with.
        rounding: results judged by one device's own rounding error, which exceeds the tolerance: parameters (their
            first gradients), `NAME after the last step`, `the loss of step N`.
        beside_one_device: the worst of these errors over that of the worst run on one device.
        buffers: after the last step, relative to the largest element of each tensor.
        excused: all excused differences, with the cause.
        compared: number of losses and tensors judged.
        undecided: tensors whose float32 error in PyTorch is above what can be excused.
        unsplit: differences between the unsplit program and the reference: faults of capture.
        captured: number of tensors of the captured program among those compared.
        not_compared: why it was not, where it could not be.
    """

    devices: int
    optimizer: str | None
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    loss: float
    gradients: Difference
    parameters: Difference
    outputs: Difference
    tolerance: float
    compiled_once: bool
    rounding: tuple[str, ...] = ()
    reference: str = "PyTorch on one device"
    beside_one_device: float = 0.0
    buffers: Difference = Difference(0.0)
    excused: tuple[tuple[str, str], ...] = ()
    compared: int = 0
    undecided: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    captured: int = 0
    not_compared: str = ""

    @property
    def status(self) -> str:
        """`equal`, `excused` (equal but for excuses), `not decided` (too many), or `differ`."""
        judged = [self.loss, self.gradients.value, self.outputs.value, self.buffers.value]
        if self.optimizer == "SGD":
            judged.append(self.parameters.value)
        if self.unsplit or not all(each <= self.tolerance for each in judged):  # so for nan
            return "differ"
        if self.undecided or len(self.excused) > MAX_EXCUSED_SHARE * self.compared:
            return "not decided"
        return "excused" if self.excused else "equal"

    @property
    def equal(self) -> bool:
        """Whether the results are equal, by the rules of the module's docstring, and decided."""
        return self.status in ("equal", "excused")

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "equal": self.equal, "status": self.status}

    def __str__(self) -> str:
        """One line per figure."""
        steps = len(self.losses)
        lines = [
            f"run on {self.devices} virtual devices against {self.reference}: "
            f"{_SAID[self.status]} (tolerance {self.tolerance:g})"
        ]
        if steps:
            lines.append(f"  losses of {steps} steps: {', '.join(f'{each:.6f}' for each in self.losses)}")
            lines.append(f"  losses differ by at most {self.loss:.1e} relative")
            lines.append(f"  gradients of step 1: {self.gradients.value:.1e} of the largest{_at(self.gradients)}")
            if self.optimizer is not None:
                note = "" if self.optimizer == "SGD" else f" (not judged under {self.optimizer})"
                lines.append(
                    f"  parameters after {steps} steps: {self.parameters.value:.1e}{_at(self.parameters)}{note}"
                )
        else:
            lines.append(f"  outputs: {self.outputs.value:.1e} of the largest{_at(self.outputs)}")
        if self.buffers.where:
            lines.append(f"  buffers: {self.buffers.value:.1e} of the largest{_at(self.buffers)}")
        if self.excused:
            lines.append(f"  excused: {len(self.excused)} of {self.compared} compared")
        if self.rounding:
            lines.append(
                f"  rounding on one device too, and off by {self.beside_one_device:.1f} times as much as there: "
                f"{_some(self.rounding)}"
            )
        for cause in sorted({cause for _, cause in self.excused} - {ROUNDS_ON_ONE_DEVICE}):
            lines.append(f"  {cause}: {_some([name for name, why in self.excused if why == cause])}")
        if self.undecided:
            lines.append(f"  off by more than can be excused, in PyTorch in float32 too: {_some(self.undecided)}")
        if self.unsplit:
            lines.append(f"  the captured program, not split, is not the model's, in {_some(self.unsplit)}")
        elif self.captured:
            lines.append(f"  the captured program, not split: {self.captured} tensors as in PyTorch")
        if self.not_compared:
            lines.append(f"  the captured program itself was not compared: {self.not_compared}")
        if not self.compiled_once:
            lines.append("  a step after the first was compiled again")
        return "\n".join(lines)


ROUNDS_ON_ONE_DEVICE = "rounding on one device too"
_SAID = {
    "equal": "equal numbers",
    "excused": "equal numbers",
    "not decided": "NOT DECIDED: too much is off on one device too",
    "differ": "NUMBERS DIFFER",
}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def _at(difference: Difference) -> str:
    return f" ({difference.where})" if difference.where else ""


def run_equal(
    plan: Plan,
    source: Source,
    steps: int = 3,
    *,
    program: Program | None = None,
    timeout: float = RUN_TIMEOUT_S,
) -> RunReport:
    """Train `steps` steps under `plan` on virtual CPU devices and on one device, and compare.

    Args:
        plan: for the program of `source`, on any mesh and for any device kind.
        source: model, sample inputs, loss and optimizer. A model on meta gets random weights. Batches are random, of
            the sample inputs' shapes.
        steps: number of steps; the first step's gradients are always compared.
        program: as captured; None to capture the source anew.
        timeout: seconds for both runs together.

    Raises:
        RunError: a source that cannot be sent to another process, weights that cannot be made; a run that failed or
            took too long.
    """
    with files.work_folder(Path(tempfile.gettempdir()), "autoshard-run-") as folder:
        save(plan, folder / "plan.json")
        request: dict[str, Any] = {"steps": steps, "origin": _origin(source), "path": sys.path}
        if request["origin"] is None:
            _send(source, folder / "source.pt")
        if program is not None:
            (folder / "program.pickle").write_bytes(pickle.dumps(program))
        (folder / "request.json").write_text(json.dumps(request))
        variables = {
            "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(plan.mesh.size), "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FASTER_COMPILES}".strip(),
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "autoshard.verify.run_worker", str(folder)]
        with open(folder / "stderr.txt", "wb") as errors, workers.started(command, variables, stderr=errors) as process:
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise RunError(f"the run took longer than {timeout:.0f} s") from None
        result = folder / "result.json"
        if not result.exists():
            said = (folder / "stderr.txt").read_text(errors="replace").splitlines()
            lines = [line for line in said if line.strip()] or [f"exit status {status}"]
            raise RunError(f"the run under the plan failed: {lines[-1]}")
        return _report(json.loads(result.read_text()))


def random_op(ops: Iterable[OpSignature]) -> OpSignature | None:
    """The first op that draws random numbers, or None."""
    return next((op for op in ops if any(word in op.name for word in RANDOM_OP_NAMES)), None)


def _origin(source: Source) -> Mapping[str, Any] | None:
    origin = source.origin
    if origin is None:
        return None
    path, colon, function = str(origin["source"]).rpartition(":")
    return {**origin, "source": f"{Path(path).resolve()}{colon}{function}"} if path.endswith(".py") else origin


def _send(source: Source, path: Path) -> None:
    """Write a source made in Python for the worker."""
    import torch

    optimizer = source.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(source.model.parameters()))
    try:
        torch.save((source.model, source.inputs, source.loss_fn, optimizer, source.train), path)
    except Exception as error:
        raise RunError(
            f"the program cannot be sent to another process ({str(error).splitlines()[0]}); name it FILE.py:FUNCTION, "
            "or define its classes and loss function at the top of an importable module"
        ) from None


def _report(found: Mapping[str, Any]) -> RunReport:
    if "error" in found:
        raise RunError(str(found["error"]))
    differences = {key: Difference(**found[key]) for key in ("gradients", "parameters", "outputs", "buffers")}
    losses = {key: tuple(found[key]) for key in ("losses", "reference_losses", "rounding", "undecided", "unsplit")}
    return RunReport(**{**found, **differences, **losses, "excused": tuple(map(tuple, found["excused"]))})
