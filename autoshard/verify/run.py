"""`verify --run`: three training steps under a plan on virtual CPU devices, against the same steps on one device.

What is compared: every loss to 1e-5 relative, every gradient of the first step and every buffer after the last one to
1e-5 of the largest element of its tensor, and parameters after the last step to 1e-5 where the optimizer is SGD (AdamW
divides by tiny second moments, so that a correct plan can move single parameters by 1e-4: reported, not judged). A
program that computes in half precision has 2e-2. A forward-only plan has its outputs compared, each to 1e-5 of its
largest element.

**The reference** is PyTorch in float64, on its own CPU kernels, in eager mode, without torch_xla, capture switches, or
shardings (in float32 where a model mixes in float32 tensors of its own). The runs share weights, batches and the code
of the model, nothing else. A program that draws random numbers (dropout) is compared with torch_xla without shardings,
from the same seed: XLA draws a tensor's numbers in one way, however it is split, and PyTorch's kernels draw others. So
are the gradients and parameters of a program in half precision that are off from PyTorch's, which adds up a bias's
gradient in float32 where XLA's CPU kernels do in bf16; its losses stay compared with both.

**The captured program** takes one of these steps on one device, by XLA alone (`verify/captured.py`), and every result,
parameter, buffer and optimizer state is held against PyTorch's (`verify/eager.py`): what it has otherwise is a fault of
capture. One that draws random numbers is not.

**Excuses.** What is off by more than the tolerance is excused, counted and named with its cause, by at most
`MAX_EXCUSED` of the tensor's largest value: where PyTorch in float32 is off from float64 as well (`rounding.py`), or
where the program not split is, and the tensor follows from what explains that (`CAUSES`). Where PyTorch in float32
itself is off by more than `MAX_EXCUSED` the tensor decides nothing. Where one does not, or more than
`MAX_EXCUSED_SHARE` of all tensors are excused, the run is *not decided*. All runs happen in one new process, which has
as many virtual devices as the plan's mesh.
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
"""Where the program holds bf16 or f16 values."""
RUN_TIMEOUT_S = 1800.0
MAX_EXCUSED = 1e-3
"""What can be excused at most, as a part of a tensor's largest value."""
MAX_EXCUSED_SHARE = 0.05
"""Of all tensors compared: so many may be excused."""
CAUSES = {
    "near-ties, which PyTorch and XLA may break otherwise": ("topk", "sort", "argmax", "argmin", "max_pool", "median"),
    "sums of a batch norm": ("native_batch_norm", "batch_norm", "var_mean"),
}
"""Why a tensor may be otherwise in XLA: words in names of the ops that it follows from."""
RANDOM_OP_NAMES = ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial", "exponential")
FASTER_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Three times faster, the same partitioned program."""


class RunError(AutoshardError, RuntimeError):
    """A plan that could not be run for comparison: why, and what to do."""


@dataclass(frozen=True)
class Difference:
    """The largest difference in some tensors, and the tensor that has it (`""` when there are none)."""

    value: float
    where: str = ""


@dataclass(frozen=True)
class RunReport:
    """Numbers under the plan against numbers on one device.

    Attributes:
        devices: virtual devices of the run under the plan.
        optimizer: class of the optimizer, or None for a plan without one.
        losses, reference_losses: per step, under the plan and on one device.
        loss: largest difference of a loss, relative.
        gradients: of the first step, relative to the largest element of each tensor.
        parameters: after the last step, absolute; judged for SGD only.
        outputs: of a forward-only plan, relative to the largest element of each tensor.
        tolerance: what the judged ones may reach.
        compiled_once: whether the steps after the first found their program compiled.
        reference: what the numbers are compared with.
        rounding: what is judged by one device's own rounding, which is more than the tolerance: parameters (their
            first gradients), `NAME after the last step`, `the loss of step N`.
        beside_one_device: how far the worst of these is from the exact number, beside the worst run on one device.
        buffers: after the last step, relative to the largest element of each tensor.
        excused: all that is off by more than the tolerance and excused, with the cause.
        compared: how many losses and tensors are judged.
        undecided: what PyTorch in float32 has as wrong as the plan, by more than can be excused.
        unsplit: what differs between the program not split and the reference: a fault of capture.
        captured: how many tensors of the captured program are among those compared.
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
        """`equal`, `excused` (equal but for what is excused), `not decided` (too much is), or `differ`."""
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
        """Whether the numbers are equal as the module's docstring says, and that is decided."""
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
        plan: for the program of `source`, on any mesh and for any device kind; its specs are what is tried.
        source: model, sample inputs, loss and optimizer. A model on meta gets random weights. Batches are random, of
            the sample inputs' shapes.
        steps: how many; the first step's gradients are compared in any case.
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
