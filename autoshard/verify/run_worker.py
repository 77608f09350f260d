"""The run worker: `python -m autoshard.verify.run_worker FOLDER`, one comparison a process (see `verify.run`)."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from autoshard.capture import switches
from autoshard.capture.inputs import split_inputs
from autoshard.capture.optimizer import make_optimizer
from autoshard.capture.sources import Source, load_source
from autoshard.capture.torch_xla import prepare_runtime
from autoshard.errors import AutoshardError
from autoshard.lower.place import free_of_weak_references
from autoshard.plan import Plan
from autoshard.verify import rounding
from autoshard.verify.run import CAUSES, HALF_TOLERANCE, MOST, ROUNDING, TOLERANCE, RunError, random_op
from autoshard.workers import end_with_parent

SEED = 20
ON_CPU, UNSPLIT, EXACT = "PyTorch on one device", "torch_xla, not split", "PyTorch in float64"
HALF = ("bf16[", "f16[")


def main() -> None:
    """Run what the folder describes; write `result.json` into it."""
    end_with_parent()
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    sys.path += [each for each in request["path"] if each not in sys.path]  # behind: no file there hides a library
    try:
        if request["origin"] is not None:
            source = load_source(**request["origin"])
        else:
            model, inputs, loss_fn, optimizer, train = torch.load(folder / "source.pt", weights_only=False)
            source = Source(model, inputs, loss_fn, optimizer, train)
        result = compare(Plan.load(folder / "plan.json"), source, request["steps"])
    except AutoshardError as error:
        result = {"error": str(error)}
    (folder / "result.json").write_text(json.dumps(result))


def compare(plan: Plan, source: Source, steps: int, keep: Path | None = None) -> dict[str, Any]:
    """Both runs, and the fields of a `RunReport`; the numbers under the plan are kept in the file `keep`, if given."""
    prepare_runtime(plan.mesh.size)
    import torch_xla

    torch_xla.device()  # autograd counts the kinds of devices when it first runs: on the reference
    model = with_weights(source.model)
    reference, kept = copy.deepcopy(model), copy.deepcopy(model)
    batches = [random_batch(source, model, step) for step in range(steps)]
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
    excused: dict[rounding.Key, float] = {}
    causes: dict[rounding.Key, str] = {}
    faults: list[rounding.Key] = []
    if off and not random:
        excused = _rounding(off, found, alone, kept, source, batches, tolerance)
        causes = dict.fromkeys(excused, ROUNDING)
        if unsplit is not None and not half:
            left = [key for key in off if key not in excused]
            causes |= _as_unsplit(left, found, unsplit, expected, plan, tolerance)
            faults = [
                key
                for key in left
                if key not in causes and key in rounding.off(unsplit.numbers(), expected.numbers(), MOST)
            ]
    differences = _differences(found, expected, causes)
    differences["loss"] = max(differences["loss"], _differences(found, on_cpu, causes)["loss"])
    return {
        "devices": plan.mesh.size,
        "optimizer": found.optimizer,
        "losses": found.losses,
        "reference_losses": expected.losses,
        **differences,
        "tolerance": tolerance,
        "rounding": [rounding.said(key) for key in excused],
        "beside_one_device": max(excused.values(), default=0.0),
        "compiled_once": found.compiles[1:] == [0] * (steps - 1),
        "reference": against,
        "excused": [(rounding.said(key), cause) for key, cause in causes.items()],
        "compared": len(found.numbers()),
        "unsplit": [rounding.said(key) for key in faults],
    }


def _as_unsplit(
    keys: list[rounding.Key], found: _Run, unsplit: _Run, expected: _Run, plan: Plan, tolerance: float
) -> dict[rounding.Key, str]:
    """Those of `keys` that torch_xla without shardings has otherwise than PyTorch too, a little, and the cause."""
    names = {op.name for op in plan.program.ops}
    if "norm" in plan.program.switches and any(
        isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in found.model.modules()
    ):
        names.add("batch_norm")  # the switch computes it in other ops
    cause = next((said for said, words in CAUSES.items() if any(w in name for name in names for w in words)), None)
    planned, alone, exact = found.numbers(), unsplit.numbers(), expected.numbers()
    excused, scales = {}, rounding.scales(exact)
    for key in keys if cause else ():
        scale = scales[key]
        own, off = rounding.apart(alone[key], exact[key]), rounding.apart(planned[key], exact[key])
        if tolerance * scale < own <= MOST * scale and off <= min(rounding.NOISE * own, MOST * scale):
            excused[key] = str(cause)
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


def alone(source: Source, steps: int, kept: Path | None = None, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """The same steps through torch_xla alone, on its one device and without a plan: whether it can train the model.

    Returns:
        `losses`, and the differences from the numbers that `compare` kept in the file `kept`, if it is there.
    """
    prepare_runtime(1)
    model = with_weights(source.model)
    begun = copy.deepcopy(model)
    batches = [random_batch(source, model, step) for step in range(steps)]
    run = _Run(model, source).steps(batches, _to_device, None)
    if kept is None or not kept.exists():
        return {"losses": run.losses}
    found = copy.copy(run)
    found.losses, found.gradients, found.parameters, found.outputs, found.buffers = torch.load(kept)
    off = rounding.off(found.numbers(), run.numbers(), tolerance)
    excused = _rounding(off, found, run, begun, source, batches, tolerance) if off else {}
    return {"losses": run.losses, **_differences(found, run, excused)}


def _differences(found: _Run, expected: _Run, excused: Collection[rounding.Key] = ()) -> dict[str, Any]:
    """The largest differences, as in a `RunReport`, of what is not excused."""
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
    keys: list[rounding.Key],
    found: _Run,
    expected: _Run,
    model: torch.nn.Module,
    source: Source,
    batches: list[Any],
    tolerance: float,
) -> dict[rounding.Key, float]:
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
    """One of the two runs, and what it gave, on the CPU."""

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
        """Run a step per batch, under `plan` if there is one, on the device that `place` puts a batch on."""
        train = self.source.train
        batches = [place(batch) for batch in batches]
        on_xla = any(isinstance(t, torch.Tensor) and t.device.type == "xla" for t in tree_leaves(batches))
        if plan is not None:
            plan.apply(self.model, self.made)
        elif on_xla:
            _move(self.model)
        if on_xla:
            import torch_xla

            torch_xla.manual_seed(SEED)
        for number, batch in enumerate(batches):
            before = _compiles()
            with plan.annotate() if plan is not None else contextlib.nullcontext():
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

    def numbers(self) -> dict[rounding.Key, torch.Tensor]:
        """All that is judged."""
        judged = self.parameters if self.optimizer == "SGD" else {}
        return rounding.flat(self.losses, self.gradients, judged, self.outputs, self.buffers)


def eager_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    train: bool = True,
) -> Any:
    """An ordinary step; returns the loss, or the output of a forward pass."""
    inputs = split_inputs(model, batch, loss_fn)
    if optimizer is not None:
        optimizer.zero_grad()
    model.zero_grad()
    with torch.set_grad_enabled(train):
        output = model(*inputs.args, **inputs.kwargs)
        if not train:
            return output
        if loss_fn is not None:
            loss = loss_fn(output, *inputs.loss_args, **dict(inputs.loss_kwargs or {}))
        elif isinstance(output, Mapping) and output.get("loss") is not None:
            loss = output["loss"]
        else:
            loss = getattr(output, "loss", output)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss


def with_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model on the CPU; one on meta is built anew, with random weights from a fixed seed.

    Raises:
        RunError: a model on meta with buffers that nothing initializes.
    """
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return copy.deepcopy(model).cpu()
    torch.manual_seed(SEED)
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "init_weights"):  # transformers: its constructor makes weights and buffers
        made: torch.nn.Module = type(model)(copy.deepcopy(config))
        return made.to(next(model.parameters()).dtype).train(model.training)
    made = copy.deepcopy(model).to_empty(device="cpu")
    fresh: set[int] = set()
    for module in made.modules():
        begin = getattr(module, "reset_parameters", None)
        if callable(begin):
            begin()
            fresh |= {id(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    with torch.no_grad():
        for parameter in made.parameters():
            if id(parameter) not in fresh:
                parameter.normal_(0.0, 0.02)
    stale = next((name for name, buffer in made.named_buffers() if id(buffer) not in fresh), None)
    if stale is not None:
        raise RunError(
            f"the model is on meta and nothing says what its buffer {stale} holds; build it with weights to run it"
        )
    return made


def random_batch(source: Source, model: torch.nn.Module, step: int) -> Any:
    """Inputs like the sample ones: normal floats, tokens below the vocabulary; masks as they are, or ones.

    Integers of a sample with values keep their range: each batch shuffles them; so do floats of which none is negative
    (probabilities, counts, pixels). Tensors that are one object in the sample are one here.
    """
    generator = torch.Generator().manual_seed(SEED + 1 + step)
    leaves, spec = tree_flatten_with_path(source.inputs)
    images = any(_leaf_name(path) == "pixel_values" for path, _ in leaves)
    made: dict[int, torch.Tensor] = {}
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            made[id(leaf)] = _random_like(leaf, _leaf_name(path), model, images, generator)
    return torch.utils._pytree.tree_unflatten(
        [made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves], spec
    )


def _random_like(
    sample: torch.Tensor, name: str, model: torch.nn.Module, images: bool, generator: torch.Generator
) -> torch.Tensor:
    if sample.is_floating_point() and not _never_negative(sample):
        return torch.randn(sample.shape, generator=generator).to(sample.dtype)
    if not sample.is_meta:
        order = torch.randperm(sample.numel(), generator=generator)
        return sample.detach().cpu().reshape(-1)[order].reshape(sample.shape)
    if sample.dtype == torch.bool or "mask" in name:
        return torch.ones(sample.shape, dtype=sample.dtype)
    return torch.randint(0, _classes(model, images), sample.shape, generator=generator).to(sample.dtype)


def _never_negative(sample: torch.Tensor) -> bool:
    """Whether a sample says that its values are of that sort; zeros alone do not, nor does what memory held."""
    if sample.is_meta or sample.numel() == 0:
        return False
    values = sample.detach().cpu().float()
    least, most = float(values.min()), float(values.max())
    return 0 <= least < most and 1e-3 <= most <= 2**16


def _classes(model: torch.nn.Module, images: bool) -> int:
    """Below what integer inputs stay: the vocabulary, or the labels of a classifier."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "num_labels", None) if images else getattr(text, "vocab_size", None)
    if found is None:
        rows = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        found = min(rows, default=2)
    return int(found)


def _leaf_name(path: Any) -> str:
    return str(getattr(path[-1], "key", "")) if path else ""


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
    """Put a model on the XLA device; its parameters stay the objects that an optimizer holds, tied ones tied."""
    with free_of_weak_references(model):
        for tensor in (*model.parameters(), *model.buffers()):
            moved = tensor.detach().to("xla")
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


def _floats(output: Any) -> dict[str, torch.Tensor]:
    leaves = tree_flatten_with_path(output)[0]
    return {
        "".join(str(key) for key in path) or "output": leaf.detach().cpu().float()
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }


def _largest(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], scales: Mapping[str, float]
) -> dict[str, Any]:
    """The largest difference, relative to the scale of its tensor, and where; nan counts as infinite."""
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
