"""Activation checkpoints: what is computed again stands behind barriers, on both front ends, and trains as PyTorch."""

from __future__ import annotations

import functools
import gc
import multiprocessing
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout
from torch.utils import checkpoint as library
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoshard
from autoshard.cost.partitioner.passes.recomputed import recomputed_ops
from autoshard.frontends.switches.checkpoints import recomputed
from autoshard.frontends.switches.table import active
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.stablehlo.reader import build_graph
from tests.conftest import FRONTENDS

Run = Callable[[torch.nn.ModuleList, torch.Tensor], torch.Tensor]


class Block(torch.nn.Module):
    """Two linear layers around a GELU, beside the input, which may be weighed."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        self.drop = torch.nn.Dropout(drop)

    def forward(self, x: torch.Tensor, weigh: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(self.down(torch.nn.functional.gelu(self.up(x))))
        return x + y if weigh is None else x + y * weigh


class Net(torch.nn.Module):
    def __init__(self, run: Run, drop: float = 0.0) -> None:
        super().__init__()
        self.head, self.run = torch.nn.Linear(8, 8), run
        self.blocks = torch.nn.ModuleList(Block(drop) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.blocks, self.head(x))


def each(blocks: Any, x: torch.Tensor, **how: Any) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, **{"use_reentrant": False, **how})
    return x


def plain(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def closed_over(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    weigh = torch.tanh(x)
    for block in blocks:
        x = checkpoint(functools.partial(block, weigh=weigh), x, use_reentrant=False)
    return x


def without_arguments(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(lambda block=block, x=x: block(x), use_reentrant=False)
    return x


def nested(blocks: Any, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
    return checkpoint(lambda x: each(blocks, x), x, use_reentrant=reentrant)


def several_results(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        made = checkpoint(lambda x, block=block: {"y": (block(x), torch.tanh(x))}, x, use_reentrant=False)
        x = made["y"][0] + made["y"][1]
    return x


def in_place(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    def scaled(block: Any, x: torch.Tensor) -> torch.Tensor:
        return block(x).mul_(0.5).add_(1.0)

    for block in blocks:
        x = checkpoint(scaled, block, x, use_reentrant=False).relu_()
    return x


def whole(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    with library.set_checkpoint_early_stop(False):
        return each(blocks, x)


def saving_products(blocks: Any, x: torch.Tensor, named: Any = None) -> torch.Tensor:
    products = named or [torch.ops.autoshard.einsum.default, torch.ops.aten.addmm.default]
    return each(blocks, x, context_fn=functools.partial(create_selective_checkpoint_contexts, products))


def every_second_product(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """As torchtitan's policy counts them, by aten's name; a linear layer with a bias is an `addmm`."""
    from torch.utils.checkpoint import CheckpointPolicy

    def contexts() -> Any:
        seen = Counter()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            assert op is not torch.ops.aten.mm.default
            if op is torch.ops.aten.addmm.default:
                seen[context.is_recompute] += 1
            save = op is torch.ops.aten.addmm.default and seen[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return each(blocks, x, context_fn=contexts)


def autocast(blocks: Any, x: torch.Tensor, run: Run = each) -> torch.Tensor:
    with torch.autocast("xla", dtype=torch.bfloat16):
        return run(blocks, x).float()


KINDS: dict[str, tuple[Run, int]] = {
    "not reentrant": (each, 2),
    "reentrant": (functools.partial(each, use_reentrant=True), 2),
    "closed over": (closed_over, 4),  # what it is weighed by needs the second product too
    "without arguments": (without_arguments, 2),
    "nested": (nested, 4),
    "nested in a reentrant one": (functools.partial(nested, reentrant=True), 4),
    "in a row": (lambda blocks, x: library.checkpoint_sequential(blocks, 2, x, use_reentrant=False), 1),
    "several results": (several_results, 2),
    "in place": (in_place, 2),
    "whole": (whole, 2),
    "products saved": (saving_products, 0),
    "products saved by aten's name": (functools.partial(saving_products, named=[torch.ops.aten.addmm.default]), 0),
    "other products saved": (functools.partial(saving_products, named=[torch.ops.aten.mm.default]), 2),
    "every second product saved": (every_second_product, 0),
    "autocast": (autocast, 2),
    "autocast, without arguments": (functools.partial(autocast, run=without_arguments), 2),
}
"""Name -> the checkpoints, and how many products of two blocks they compute again."""


def captured(run: Run, frontend: str, drop: float = 0.0) -> tuple[Any, Any, Any, Any, Graph]:
    torch.manual_seed(0)
    model, x = Net(run, drop), torch.randn(8, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = autoshard.capture(model, (x,), loss_fn=mean_square, optimizer=optimizer, frontend=frontend)
    return model, x, optimizer, program, build_graph(program)


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def products(graph: Graph) -> list[int]:
    return [op.id for op in graph.ops if op.kind == "dot_general"]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_again_stands_behind_a_barrier(kind: str, frontend: str) -> None:
    """So that XLA's look for equal instructions, and ours, leave it alone: it reads nothing that is read before."""
    run, count = KINDS[kind]
    *_, graph = captured(run, frontend)
    barriers = Counter(op.kind for op in graph.ops)["optimization_barrier"]
    again = recomputed_ops(graph)
    assert barriers
    assert len(again.intersection(products(graph))) == count
    assert len(products(graph)) == 14 + count
    made = {op.id for op in graph.ops if op.id in again}
    for number in again.intersection(products(graph)):
        behind = (graph.ops[value.op] for value in graph.ops[number].operands)
        assert all(op.id in made or op.kind == "optimization_barrier" for op in behind)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_second_pass_waits_for_a_gradient_that_is_read_behind_its_barrier(kind: str, frontend: str) -> None:
    """XLA drops an operand whose result nothing reads; the second pass would then run before the backward pass."""
    *_, graph = captured(KINDS[kind][0], frontend)
    again = recomputed_ops(graph)
    waiting = 0
    for op in graph.ops:
        if op.kind == "optimization_barrier":
            read = (value for i, value in enumerate(op.operands) if graph.is_read(Value(op.id, i)))
            waiting += any(graph.phase(value.op) == "backward" and value.op not in again for value in read)
    assert waiting >= (1 if kind == "in a row" else 2)


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant", "nested", "closed over", "in place"])
def test_captured_checkpoints_train_as_in_pytorch(kind: str) -> None:
    model, x, optimizer, program, _ = captured(KINDS[kind][0], FRONTENDS[-1])
    step = autoshard.plan_program(program, Mesh((1,))).to_jax().step(program, optimizer)
    state = step.place(model, optimizer)
    for _ in range(2):
        state, out = step(state, (x,))
        optimizer.zero_grad()
        loss = mean_square(model(x))
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(float(out["loss"]), loss.item(), rtol=1e-5)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(np.asarray(state[name]), parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif("torchax" not in FRONTENDS, reason="needs torchax")
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_drawn_again_as_it_was(reentrant: bool) -> None:
    """Masks of both passes follow from one seed: the second pass is that of the first."""
    run = functools.partial(each, use_reentrant=reentrant)
    *_, graph = captured(run, "torchax", drop=0.5)
    seeds = Counter(expression(graph, op.operands[0]) for op in graph.ops if op.kind == "rng_bit_generator")
    assert sorted(seeds.values()) == [2, 2]


class Dropped(torch.nn.Module):
    """Its value is the sum, over the weights of any block, of weight times gradient, if both passes drop the same."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.head, self.run = torch.nn.Linear(64, 64, bias=False), run
        self.weights = torch.nn.ParameterList(torch.rand(64) + 0.5 for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = dropout(self.head(x), 0.2)
        for weight in self.weights:
            x = self.run(lambda x, weight=weight: dropout(dropout(x * weight, 0.5).abs(), 0.3), x)
        return x.abs().sum()


def of_torch_xla(block: Any, x: torch.Tensor) -> torch.Tensor:
    library = pytest.importorskip("torch_xla.utils.checkpoint")
    made: torch.Tensor = library.checkpoint(block, x) if x.device.type == "xla" else checkpoint(block, x)
    return made


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mul.Tensor])


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    "run",
    [
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
        functools.partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
        of_torch_xla,
    ],
    ids=["not reentrant", "reentrant", "selective", "torch_xla's"],
)
@pytest.mark.filterwarnings("ignore:.*use_reentrant")
def test_both_passes_drop_the_same(run: Any, frontend: str) -> None:
    """In jax, programs of torch_xla drew the second pass from a seed of its own."""
    torch.manual_seed(0)
    model, x = Dropped(run), torch.randn(8, 64)
    program = autoshard.capture(model, x, train=True, frontend=frontend)
    draws = [op for op in program.ops if "bernoulli" in op.name or "native_dropout" in op.name]
    assert len(draws) == 9  # one, and two of each block in both passes
    step = autoshard.plan_program(program, Mesh((1,))).to_jax().step(program)
    losses = []
    for _ in range(2):
        _, out = step(step.place(model), (x,))
        losses.append(float(out["loss"]))
        for i, weight in enumerate(model.weights):
            found = (np.asarray(out[f"weights.{i}.grad"]) * weight.detach().numpy()).sum()
            np.testing.assert_allclose(found, losses[-1], rtol=1e-5)
    assert losses[0] != losses[1]


def step_runs() -> None:
    """Both passes of a checkpoint drop the same as a step runs on an XLA device."""
    import torch_xla

    torch.manual_seed(0)
    model = Dropped(functools.partial(checkpoint, use_reentrant=False)).to("xla")
    with active():
        loss = model(torch.randn(8, 64).to("xla"))
        loss.backward()
    torch_xla.sync()
    for weight in model.weights:
        torch.testing.assert_close((weight * weight.grad).sum(), loss, rtol=1e-5, atol=0.0)


@pytest.mark.skipif("torch_xla" not in FRONTENDS, reason="needs torch_xla")
def test_both_passes_drop_the_same_as_the_step_runs() -> None:
    """In a process of its own: where others were captured before, torch_xla crashes as it executes."""
    process = multiprocessing.get_context("spawn").Process(target=step_runs)
    process.start()
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_transformers_compute_each_layer_again(reentrant: bool, frontend: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tokens = torch.zeros(2, 8, dtype=torch.long)
    program = autoshard.capture(model, {"input_ids": tokens, "labels": tokens}, train=True, frontend=frontend)
    graph = build_graph(program)
    # queries, keys, values, scores, weighted values, output, gate and up; the last, down, is not needed again
    assert len(recomputed_ops(graph).intersection(products(graph))) == 2 * 8


def expression(graph: Graph, value: Value) -> str:
    """What a value is computed by."""
    op = graph.ops[value.op]
    if op.kind == "argument":
        return f"argument {op.id}"
    return f"{op.kind} {op.attrs} {value.result} ({', '.join(expression(graph, read) for read in op.operands)})"


@pytest.mark.skipif(len(FRONTENDS) < 2, reason="needs torch_xla and torchax")
@pytest.mark.parametrize("kind", ["not reentrant", "reentrant", "closed over", "autocast"])
def test_both_front_ends_number_alike(kind: str) -> None:
    """A plan that one made can annotate the step that runs on the other."""
    one, other = (captured(KINDS[kind][0], frontend)[3] for frontend in FRONTENDS)
    assert [(op.name, op.inputs) for op in one.ops] == [(op.name, op.inputs) for op in other.ops]


def test_a_second_pass_leaves_no_cycle_behind() -> None:
    """One kept a checkpoint's tensors alive until a collection: torch_xla's second step was another program."""
    torch.manual_seed(0)
    model = Net(each, 0.0)
    gc.collect()
    gc.disable()
    try:
        with recomputed():
            model(torch.randn(8, 4, 8)).sum().backward()
        left = [type(one).__qualname__ for one in gc.get_objects() if type(one).__name__ in ("Again", "_Hide")]
    finally:
        gc.enable()
    assert left == []
