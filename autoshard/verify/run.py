"""`verify --run`: three training steps under a plan on virtual CPU devices, against the same steps on one device.

What is compared is DESIGN's "equal numbers": every loss to 1e-5 relative, every gradient of the first step to 1e-5 of
the largest element of its tensor, and parameters after the last step to 1e-5 where the optimizer is SGD (AdamW divides
by tiny second moments, so that a correct plan can move single parameters by 1e-4: reported, not judged). A program that
computes in half precision has 2e-2. A forward-only plan has its outputs compared, each to 1e-5 of its largest element.

Numbers that one device itself does not compute to the tolerance (a gradient that is zero in exact arithmetic, or one
behind a ReLU that is undecided) are rounding. They are told on one device, by the same steps in float64 and with
results that are off in their last bits, named in the report, and judged by how far one device is from the exact ones
(`rounding.py`).

The two runs share weights, batches and the code of the model, nothing else: the reference is PyTorch's own CPU kernels
in eager mode, without torch_xla, capture switches, or shardings. A program that draws random numbers (dropout) is
compared with torch_xla without shardings, from the same seed: XLA draws a tensor's numbers in one way, however it is
split, and PyTorch's kernels draw others. So are the gradients and
parameters of a program in half precision that are off from PyTorch's, which adds up a bias's gradient in float32 where
XLA's CPU kernels do in bf16; its losses stay compared with both. Both runs happen in one new process, which has as many
virtual devices as the plan's mesh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard import files, workers
from autoshard.errors import AutoshardError
from autoshard.plan import OpSignature, Plan

if TYPE_CHECKING:
    from autoshard.capture.sources import Source

TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2
"""Where the program holds bf16 or f16 values."""
DEFAULT_TIMEOUT_S = 1800.0
RANDOM = ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial", "exponential")
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

    @property
    def equal(self) -> bool:
        """Whether the numbers are equal as the module's docstring says."""
        judged = [self.loss, self.gradients.value, self.outputs.value]
        if self.optimizer == "SGD":
            judged.append(self.parameters.value)
        return all(each <= self.tolerance for each in judged)  # false for nan

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "equal": self.equal}

    def __str__(self) -> str:
        """One line per figure."""
        steps = len(self.losses)
        lines = [
            f"run on {self.devices} virtual devices against {self.reference}: "
            f"{'equal numbers' if self.equal else 'NUMBERS DIFFER'} (tolerance {self.tolerance:g})"
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
        if self.rounding:
            lines.append(
                f"  rounding on one device too, and off by {self.beside_one_device:.1f} times as much as there: "
                f"{', '.join(self.rounding)}"
            )
        if not self.compiled_once:
            lines.append("  a step after the first was compiled again")
        return "\n".join(lines)


def _at(difference: Difference) -> str:
    return f" ({difference.where})" if difference.where else ""


def run_equal(plan: Plan, source: Source, steps: int = 3, *, timeout: float = DEFAULT_TIMEOUT_S) -> RunReport:
    """Train `steps` steps under `plan` on virtual CPU devices and on one device, and compare.

    Args:
        plan: for the program of `source`, on any mesh and for any device kind; its specs are what is tried.
        source: model, sample inputs, loss and optimizer. A model on meta gets random weights. Batches are random, of
            the sample inputs' shapes.
        steps: how many; the first step's gradients are compared in any case.
        timeout: seconds for both runs together.

    Raises:
        RunError: a source that cannot be sent to another process, weights that cannot be made; a run that failed or
            took too long.
    """
    with files.work_folder(Path(tempfile.gettempdir()), "autoshard-run-") as folder:
        plan.save(folder / "plan.json")
        request: dict[str, Any] = {"steps": steps, "origin": _origin(source)}
        if request["origin"] is None:
            _send(source, folder / "source.pt")
        (folder / "request.json").write_text(json.dumps(request))
        variables = {
            "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(plan.mesh.size), "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FASTER_COMPILES}".strip(),
        }  # fmt: skip
        command = [sys.executable, "-m", "autoshard.verify.run_worker", str(folder)]
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
    return next((op for op in ops if any(word in op.name for word in RANDOM)), None)


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
    differences = {key: Difference(**found[key]) for key in ("gradients", "parameters", "outputs")}
    losses = {key: tuple(found[key]) for key in ("losses", "reference_losses", "rounding")}
    return RunReport(**{**found, **differences, **losses})
