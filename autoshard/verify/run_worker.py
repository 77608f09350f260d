"""The worker of `verify.run`: `python -m autoshard.verify.run_worker FOLDER`, one comparison a process."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.errors import AutoshardError
from autoshard.frontends.switches import table as switches
from autoshard.frontends.switches.autocast import autocast_on
from autoshard.frontends.torch_xla.program import capture, prepare_runtime
from autoshard.frontends.tracing.optimizer import make_optimizer
from autoshard.lower.torch_xla.mark_sharding import annotate, apply
from autoshard.lower.torch_xla.place import free_of_weak_references
from autoshard.plans.json_format import load
from autoshard.plans.value import Plan
from autoshard.program import Program
from autoshard.sources import Source, load_source
from autoshard.verify import rounding
from autoshard.verify.batches import BATCH_SEED, random_batch, with_weights
from autoshard.verify.eager import eager_step, named_leaves
from autoshard.verify.judged import Causes, Said, of_captured
from autoshard.verify.run import HALF_TOLERANCE, MAX_EXCUSED, ROUNDS_ON_ONE_DEVICE, TOLERANCE, random_op
from autoshard.workers import end_with_parent

ON_CPU, UNSPLIT, EXACT = "PyTorch on one device", "torch_xla, not split", "PyTorch in float64"
HALF = ("bf16[", "f16[")


def main() -> None:
    """Run the request in the folder; write `result.json` into it."""
    end_with_parent()
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    sys.path += [each for each in request["path"] if each not in sys.path]  # appended: no file there shadows a library
    try:
        if request["origin"] is not None:
            with autocast_on():
                source = load_source(**request["origin"])
        else:
            model, inputs, loss_fn, optimizer, train = torch.load(folder / "source.pt", weights_only=False)
            source = Source(model, inputs, loss_fn, optimizer, train)
        kept = folder / "program.pickle"
        plan = load(folder / "plan.json")
        program = pickle.loads(kept.read_bytes()) if kept.exists() else captured(source, plan.program.switches)
        result = compare(plan, source, request["steps"], program)
    except AutoshardError as error:
        result = {"error": str(error)}
    (folder / "result.json").write_text(json.dumps(result))


def captured(source: Source, under: Sequence[str] = switches.DEFAULT) -> Program:
    """The source's program under these capture switches."""
    given = {"loss_fn": source.loss_fn, "optimizer": source.optimizer, "train": source.train, "switches": under}
    return capture(source.model, source.inputs, **given)


def compare(
    plan: Plan, source: Source, steps: int, program: Program | None = None, keep: Path | None = None
) -> dict[str, Any]:
    """All runs, and the fields of a `RunReport`.

    Args:
        program: as captured; without it only the runs through torch_xla are compared.
        keep: a file for the results under the plan.
    """
    prepare_runtime(plan.mesh.size)
    import torch_xla

    torch_xla.device()  # autograd counts the kinds of devices when it first runs: on the reference
    model = with_weights(source.model)
    reference, kept = copy.deepcopy(model), copy.deepcopy(model)
    batches = [random_batch(source, model, step, plan.program.reads) for step in range(steps)]
    random = random_op(plan.program.ops) is not None
    if random:  # PyTorch's kernels draw other numbers than XLA's do
        with switches.active(plan.program.switches, reference):
            expected = _Run(reference, source).steps(batches, _to_device, None)
    else:
        expected = _Run(reference, source).steps(batches, lambda batch: batch, None)
    found = _Run(model, source).steps(batches, _to_device, plan)
    if keep is not None:
        torch.save((found.losses, found.gradients, found.parameters, found.outputs, found.buffers), keep)
    half = any(output.startswith(HALF) for op in plan.program.ops for output in op.outputs)
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    against, on_cpu, alone, unsplit = (UNSPLIT if random else ON_CPU), expected, expected, None
    exact = None if random or half else _exact(kept, source, batches)
    if exact is not None:
        against, expected, on_cpu = EXACT, exact, exact
    off = rounding.off(found.numbers(), expected.numbers(), tolerance)
    if off and not random:
        with switches.active(plan.program.switches, reference := copy.deepcopy(kept)):
            unsplit = _Run(reference, source).steps(batches, _to_device, None)
        if half:  # XLA's kernels for the CPU add up in half precision, PyTorch's in float32
            against, expected, alone = UNSPLIT, unsplit, unsplit
            off = rounding.off(found.numbers(), expected.numbers(), tolerance)
    because = Causes(program, found.model) if program is not None else None
    rounded: dict[rounding.TensorKey, float] = {}
    causes: dict[rounding.TensorKey, str] = {}
    undecided, faults = [], []
    if off and not random:
        rounded = _rounding(off, found, alone, kept, source, batches, tolerance)
        most = max(MAX_EXCUSED, tolerance)
        undecided = rounding.beyond(found.numbers(), expected.numbers(), rounded, most, tolerance)
        causes = {key: ROUNDS_ON_ONE_DEVICE for key in rounded if key not in undecided}
        if unsplit is not None and not half:
            left = [key for key in off if key not in rounded]
            causes |= _as_unsplit(left, found, unsplit, expected, because, tolerance)
            beyond = rounding.off(unsplit.numbers(), expected.numbers(), MAX_EXCUSED)
            faults = [key for key in left if key not in causes and key in beyond]
    excluded = {*causes, *undecided}
    differences = _differences(found, expected, excluded)
    differences["loss"] = max(differences["loss"], _differences(found, on_cpu, excluded)["loss"])
    said = Said()
    if program is not None and not random:
        said = of_captured(program, source, kept, batches, because, found.optimizer, tolerance)
    return {
        "devices": plan.mesh.size,
        "optimizer": found.optimizer,
        "losses": found.losses,
        "reference_losses": expected.losses,
        **differences,
        "tolerance": tolerance,
        "rounding": [rounding.said(key) for key in rounded if key not in undecided],
        "beside_one_device": max(rounded.values(), default=0.0),
        "compiled_once": found.compiles[1:] == [0] * (steps - 1),
        "reference": against,
        "excused": [*((rounding.said(key), cause) for key, cause in causes.items()), *said.excused],
        "compared": len(found.numbers()) + said.compared,
        "undecided": [*map(rounding.said, undecided), *said.undecided],
        "unsplit": [*map(rounding.said, faults), *said.faults],
        "captured": said.compared,
        "not_compared": said.refused,
    }


def _as_unsplit(
    keys: list[rounding.TensorKey], found: _Run, unsplit: _Run, expected: _Run, because: Causes | None, tolerance: float
) -> dict[rounding.TensorKey, str]:
    """Those of `keys` that torch_xla without shardings also has slightly different from PyTorch, and the cause."""
    planned, alone, exact = found.numbers(), unsplit.numbers(), expected.numbers()
    excused, scales = {}, rounding.scales(exact)
    for key in keys if because is not None else ():
        assert because is not None
        kind, name = key
        first = kind in ("gradients", "outputs") or key == ("loss", "1")
        cause = because(name.partition(" of batch ")[0] if kind != "loss" else "loss", first_step=first)
        own, off = rounding.apart(alone[key], exact[key]), rounding.apart(planned[key], exact[key])
        scale = scales[key]
        if (
            cause
            and tolerance * scale < own <= MAX_EXCUSED * scale
            and off <= min(rounding.ROUNDING_SLACK * own, MAX_EXCUSED * scale)
        ):
            excused[key] = cause
    return excused


def _exact(model: torch.nn.Module, source: Source, batches: list[Any]) -> _Run | None:
    """The steps by PyTorch in float64; None for a model that mixes in float32 tensors of its own."""
    torch.set_default_dtype(torch.float64)  # for what the model makes itself
    try:
        return _Run(copy.deepcopy(model).double(), source).steps(rounding.wide(batches), lambda batch: batch, None)
    except RuntimeError:
        return None
    finally:
        torch.set_default_dtype(torch.float32)


def alone(
    source: Source, steps: int, kept: Path | None = None, tolerance: float = TOLERANCE, reads: Sized = ()
) -> dict[str, Any]:
    """The same steps through torch_xla on one device without a plan: whether it can train the model.

    Returns:
        `losses`, and the differences from the results that `compare` wrote to `kept`, if it exists.
    """
    prepare_runtime(1)
    model = with_weights(source.model)
    begun = copy.deepcopy(model)
    batches = [random_batch(source, model, step, reads) for step in range(steps)]
    run = _Run(model, source).steps(batches, _to_device, None)
    if kept is None or not kept.exists():
        return {"losses": run.losses}
    found = copy.copy(run)
    found.losses, found.gradients, found.parameters, found.outputs, found.buffers = torch.load(kept)
    off = rounding.off(found.numbers(), run.numbers(), tolerance)
    excused = _rounding(off, found, run, begun, source, batches, tolerance) if off else {}
    return {"losses": run.losses, **_differences(found, run, excused)}


def _differences(found: _Run, expected: _Run, excused: Collection[rounding.TensorKey] = ()) -> dict[str, Any]:
    """The largest differences that are not excused, as in a `RunReport`."""
    losses = [
        abs(a - b) / max(abs(b), 1e-30)
        for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True), 1)
        if ("loss", str(step)) not in excused
    ]

    scales = rounding.scales(
        rounding.flat([], expected.gradients, expected.parameters, expected.outputs, expected.buffers)
    )

    def of(kind: str) -> dict[str, Any]:
        one, other = (
            {name: each for name, each in getattr(run, kind).items() if (kind, name) not in excused}
            for run in (found, expected)
        )
        return _largest(one, other, {name: scales[kind, name] for name in other})

    return {
        "loss": max(losses, default=0.0),
        **{kind: of(kind) for kind in ("gradients", "parameters", "outputs", "buffers")},
    }


def _rounding(
    keys: list[rounding.TensorKey],
    found: _Run,
    expected: _Run,
    model: torch.nn.Module,
    source: Source,
    batches: list[Any],
    tolerance: float,
) -> dict[rounding.TensorKey, float]:
    """Which of `keys` are rounding (see `rounding`); `model` has the weights that the runs began with."""
    here = lambda batch: batch  # noqa: E731
    run = _exact(model, source, batches)
    exact = None if run is None else run.numbers()

    def neighbours() -> Iterator[rounding.Numbers]:
        for number in range(rounding.NEIGHBOURS):
            other = _Run(copy.deepcopy(model), source)
            with rounding.LastBits(number):
                other.steps(batches, here, None)
            yield other.numbers()

    return rounding.rounding(keys, found.numbers(), expected.numbers(), exact, neighbours(), tolerance)


class _Run:
    """One run and its results, on the CPU."""

    def __init__(self, model: torch.nn.Module, source: Source) -> None:
        self.model, self.source = model, source
        self.made = None
        if source.optimizer is not None:
            old = list(source.model.parameters())
            self.made = make_optimizer(
                source.optimizer, {id(a): b for a, b in zip(old, model.parameters(), strict=True)}
            )
        self.optimizer = type(self.made).__name__ if self.made is not None else None
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.compiles: list[int] = []

    def steps(self, batches: list[Any], place: Callable[[Any], Any], plan: Plan | None) -> _Run:
        """Run a step per batch, under `plan` if given, on the device that `place` moves a batch to."""
        train = self.source.train
        batches = [place(batch) for batch in batches]
        on_xla = any(isinstance(t, torch.Tensor) and t.device.type == "xla" for t in tree_leaves(batches))
        if plan is not None:
            apply(plan, self.model, self.made)
        elif on_xla:
            _move(self.model)
        if on_xla:
            import torch_xla

            torch_xla.manual_seed(BATCH_SEED)
        for number, batch in enumerate(batches):
            before = _compiles()
            with annotate(plan) if plan is not None else contextlib.nullcontext():
                result = eager_step(self.model, self.made, batch, self.source.loss_fn, train)
            if on_xla:
                torch_xla.sync()
            self.compiles.append(_compiles() - before)
            if train:
                self.losses.append(float(result.detach()))
                if number == 0:
                    self.gradients = {
                        name: p.grad.detach().cpu().clone()
                        for name, p in self.model.named_parameters()
                        if p.grad is not None
                    }
            else:
                self.outputs.update({f"{path} of batch {number}": t for path, t in _floats(result).items()})
        if train:
            self.buffers = {name: b.detach().cpu() for name, b in self.model.named_buffers()}
            self.parameters = {name: p.detach().cpu() for name, p in self.model.named_parameters()}
        return self

    def numbers(self) -> dict[rounding.TensorKey, torch.Tensor]:
        """All results that are judged."""
        judged = self.parameters if self.optimizer == "SGD" else {}
        return rounding.flat(self.losses, self.gradients, judged, self.outputs, self.buffers)


def _to_device(batch: Any) -> Any:
    moved: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in moved:
            moved[id(leaf)] = leaf.to("xla")
        return moved[id(leaf)]

    return tree_map(move, batch)


def _move(model: torch.nn.Module) -> None:
    """Move a model to the XLA device; its parameters stay the objects that an optimizer holds, tied ones tied."""
    with free_of_weak_references(model):
        for tensor in (*model.parameters(), *model.buffers()):
            moved = tensor.detach().to("xla")
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


def _floats(output: Any) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu().float() for name, t in named_leaves(output) if t.is_floating_point()}


def _largest(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], scales: Mapping[str, float]
) -> dict[str, Any]:
    """The largest difference, relative to the scale of its tensor, and where; NaN counts as infinite."""
    worst, where = 0.0, ""
    for name in expected.keys() | found.keys():
        if name not in found or name not in expected:
            return {"value": math.inf, "where": f"{name}, in one run only"}
    for name in sorted(expected):
        a, b = found[name].double(), expected[name].double()
        if b.numel() == 0:
            continue
        scale = scales[name]
        difference = float((a - b).abs().max())
        value = 0.0 if difference == 0 else difference / scale if scale > 0 else math.inf
        value = math.inf if math.isnan(value) else value
        if value > worst:
            worst, where = value, name
    return {"value": worst, "where": where}


def _compiles() -> int:
    import torch_xla.debug.metrics as metrics

    return int(metrics.counter_value("UncachedCompile") or 0)


if __name__ == "__main__":
    main()
