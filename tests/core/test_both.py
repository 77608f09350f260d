"""One program through torch_xla and through torchax: one sequence of aten ops, one plan."""

import contextlib

import pytest
import torch
from torch import nn

pytest.importorskip("torch_xla", reason="holds torchax's captures against those of torch_xla, which is not installed")
pytest.importorskip("transformers")

import autoshard
from autoshard.cost.partitioner.passes.simplify import fold
from autoshard.frontends.torch_xla.program import prepare_runtime
from autoshard.graph.groups import ELEMENTWISE, free_ops
from autoshard.lower.torch_xla.mark_sharding import annotated_program
from autoshard.mesh import Mesh
from autoshard.planning.one_mesh import formulated
from autoshard.stablehlo.reader import build_graph
from tests.core import nets

prepare_runtime()
OWN_POOL = {"resnet"}
"""torch_xla has max pooling as an op of its own, of one result."""


@pytest.fixture(scope="module", params=list(nets.NETS))
def both(request):
    made = nets.NETS[request.param]()
    model, inputs = made["model"], made["inputs"]
    programs = {
        frontend: autoshard.capture(model, inputs, loss_fn=made["loss_fn"], optimizer=nets.adamw, frontend=frontend)
        for frontend in ("torch_xla", "torchax")
    }
    return request.param, made, programs["torch_xla"], programs["torchax"]


def test_the_same_ops_under_the_same_numbers(both):
    name, _, xla, ours = both
    assert len(xla.ops) == len(ours.ops)
    pooled = 0
    for a, b in zip(xla.ops, ours.ops, strict=True):
        if name in OWN_POOL and a.name.startswith("xla.max_pool2d"):
            pooled += 1
            assert b.name.startswith("aten.max_pool2d_with_indices")
            assert (a.outputs[0], a.inputs) == (b.outputs[0], b.inputs[: len(a.inputs)])
            continue
        assert a == b
    assert pooled == (2 if name in OWN_POOL else 0)


def test_the_same_arguments_and_results(both):
    name, _, xla, ours = both
    arguments = [[a for a in program.arguments if a.role != "scalar"] for program in (xla, ours)]
    key = str if name in OWN_POOL else None  # else in the same order too
    assert (
        arguments[0] == arguments[1] if key is None else sorted(arguments[0], key=key) == sorted(arguments[1], key=key)
    )
    assert [(o.name, o.role, o.type) for o in xla.outputs] == [(o.name, o.role, o.type) for o in ours.outputs]
    for a, b in zip(xla.outputs, ours.outputs, strict=True):
        assert (a.updates is None) == (b.updates is None)
        if a.updates is not None and b.updates is not None:
            assert xla.arguments[a.updates].name == ours.arguments[b.updates].name


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_the_same_plan_up_to_ties(both, device):
    _, _, xla, ours = both
    mesh = Mesh((2, 4), device=device)
    theirs, mine = (autoshard.plan_program(program, mesh) for program in (xla, ours))
    assert mine.predicted.step_time_s == pytest.approx(theirs.predicted.step_time_s, rel=0.01)
    if both[0] not in OWN_POOL:  # the modules have one order: the same is fused and combined
        assert autoshard.evaluate(ours, theirs).step_time_s == pytest.approx(theirs.predicted.step_time_s, rel=0.01)
    differs = [n for n, t in theirs.parameters.items() if mine.parameters[n].spec != t.spec]
    if differs and both[0] not in OWN_POOL:  # then neither choice is better, priced on one program
        assert autoshard.evaluate(ours, theirs).step_time_s == pytest.approx(mine.predicted.step_time_s, rel=0.01)


def test_a_plan_made_without_torch_xla_holds_under_it(both):
    name, made, xla, ours = both
    plan = autoshard.plan_program(ours, Mesh((2, 4)))
    if name in OWN_POOL:
        with pytest.raises(autoshard.PlanError, match="max_pool2d"):
            plan.check_program(xla)
        return
    plan.check_program(xla)
    module = annotated_program(plan, made["model"], made["inputs"], loss_fn=made["loss_fn"], optimizer=nets.adamw)
    splits = any(any(dim) for tensor in plan.parameters.values() for dim in tensor.spec)
    assert b"devices=[" in module or not splits


class Spread(nn.Module):
    """Means and deviations that keep the dims over which they are taken."""

    def forward(self, x):
        return x - x.mean(-1, keepdim=True), x.var((0, 1), keepdim=True), x.std(1, keepdim=True)


@pytest.mark.parametrize("frontend", ["torch_xla", "torchax"])
def test_what_is_averaged_is_annotated_where_it_is_computed(frontend):
    """Not behind a reshape, before which propagation had it split as other means are, through their one constant.

    BERT's step on 8 H100 was predicted 11 % dearer through torch_xla.
    """
    graph = build_graph(autoshard.capture(Spread(), torch.zeros(4, 6, 8), frontend=frontend))
    of = {op.index: op.name.split(".")[1] for op in graph.program.ops}
    averaged = [fold(graph).resolve(v) for (k, _), v in graph.aten_outputs.items() if of[k] in ("mean", "var", "std")]
    kinds = [graph.ops[value.op].kind for value in averaged]
    assert len(kinds) == 3
    assert "reshape" not in kinds


class Experts(nn.Module):
    """Elements that indices name along a dim: none of them is negative, which needs no look."""

    def forward(self, x, places):
        rows = places[0]
        along = x.gather(1, places), x.scatter(1, places, x), x.scatter_add(1, places, x)
        return *along, x.index_select(1, rows), x.index_add(1, rows, x)


def test_indices_along_a_dim_are_read_as_they_are():
    places = torch.zeros(4, 8, dtype=torch.long)
    compared = []
    for frontend in ("torch_xla", "torchax"):
        graph = build_graph(autoshard.capture(Experts(), (torch.zeros(4, 8), places), frontend=frontend))
        compared.append(sum(op.kind == "compare" for op in graph.ops))
    assert compared == [0, 0]


class Written(nn.Module):
    """What both frontends lower themselves, in forms that torch_xla has of its own."""

    def __init__(self):
        super().__init__()
        self.filter, self.mix = nn.Conv1d(6, 6, 3, padding=1), nn.Linear(6, 12)

    def forward(self, x, rows):
        x = nn.functional.leaky_relu(self.filter(x), 0.2)
        queries, keys = self.mix(x.transpose(1, 2)).unflatten(-1, (2, 6)).unbind(-2)
        x = (queries + keys.clamp(-1.0, 1.0)).softmax(-1).log_softmax(1)
        x = x - x.amax() + nn.functional.hardtanh(x, -0.5, 0.7) + x.mean(1, keepdim=True).repeat(1, 8, 1)
        x = x.index_select(1, rows).index_add(1, rows, torch.add(x, x, alpha=0.3))
        tanh = nn.functional.gelu(x, approximate="tanh")
        return nn.functional.mse_loss(nn.functional.gelu(x) + tanh, x)


def what_moves(graph):
    """Of each aten op the kinds of its ops that move or sum something, and do not follow from constants."""
    free, made = free_ops(graph), {}
    for op in graph.ops:
        same = len(op.operands) == 1 and graph.type_of(op.operands[0]) == op.results[0]
        if op.aten is not None and op.id not in free and op.kind not in ELEMENTWISE and not same:
            made.setdefault((op.aten, graph.program.ops[op.aten].name), []).append(op.kind)
    return made


def test_both_write_an_op_in_the_same_ones():
    """A product with 1, a reshape there and back, another form of one gradient: each made other kernels to decide on.

    T5, Whisper, a diffusion transformer and a graph network were planned apart by 1.6 to 4.8 %.
    """
    inputs = torch.zeros(4, 6, 8), torch.arange(8)
    made, problems = [], []
    for frontend in ("torch_xla", "torchax"):
        program = autoshard.capture(Written(), inputs, loss_fn=lambda y: y, optimizer=nets.adamw, frontend=frontend)
        graph = build_graph(program)
        made.append(what_moves(graph))
        problem = formulated(graph, Mesh((2, 4), device="h100"), None, {}).problem
        problems.append([len(costs) for costs in problem.node_costs])
    assert made[0] == made[1]
    assert problems[0] == problems[1]


@pytest.mark.parametrize("activation", [nn.Hardswish, nn.Hardsigmoid, nn.PReLU])
def test_an_op_that_torch_writes_in_others_may_make_numbers(activation):
    """What its decomposition makes of nothing had no data: "needs the value of a tensor"."""
    model = nn.Sequential(nn.Linear(8, 8), activation())
    program = autoshard.capture(model, torch.zeros(4, 8), loss_fn=torch.sum, optimizer=nets.adamw, frontend="torchax")
    assert len(program.outputs) > 1


class Converted(nn.Module):
    """Writes to what another dtype was made of: an input, and positions that the step makes (T5's buckets)."""

    def forward(self, x):
        made = (torch.arange(8, device=x.device) > 2).to(torch.long) * 2
        made += torch.arange(8, device=x.device)
        half = x.to(torch.bfloat16)
        half[2:4] = 5
        half[:3].mul_(2)
        whole = x.to(torch.int64)
        whole += made
        return half, whole, made


def test_writes_to_a_converted_tensor_are_the_same_ops():
    programs = [autoshard.capture(Converted(), torch.zeros(8), frontend=f) for f in ("torch_xla", "torchax")]
    assert programs[0].ops == programs[1].ops


class Casts(nn.Module):
    """Autocast of the device that the step runs on, with parts of every kind: cast down, cast up, to the widest."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            features = torch.relu(self.norm(self.convolution(images))).flatten(2).transpose(1, 2)
            features = features + self.attention(features, features, features, need_weights=False)[0]
            scores = self.head((features**2).mean(1))
            with torch.autocast(images.device.type, enabled=False):
                whole = self.head(scores.float() @ torch.ones(4, 8, device=images.device))
            return torch.cat([scores, whole], 1).softmax(-1)


def square(out):
    return out.square().mean()


@pytest.mark.parametrize("name", ["casts", "gpt2", "llama"])
def test_autocast_casts_the_same(name):
    """Inside the model, and around `capture()`."""
    made = {"model": Casts(), "inputs": torch.zeros(4, 3, 8, 8), "loss_fn": square}
    made = made if name == "casts" else nets.NETS[name]()
    programs = []
    for frontend in ("torch_xla", "torchax"):
        with torch.autocast("xla", dtype=torch.bfloat16) if name != "casts" else contextlib.nullcontext():
            options = {"loss_fn": made["loss_fn"], "optimizer": nets.adamw, "frontend": frontend}
            programs.append(autoshard.capture(made["model"], made["inputs"], **options))
    assert programs[0].ops == programs[1].ops
    types = [kind.dtype for op in programs[1].ops for kind in op.outputs]
    assert types.count("bf16") > 50
    assert not torch.is_autocast_enabled("xla")


@pytest.mark.parametrize("name", ["addmm", "addmv", "addbmm"])
def test_products_added_with_factors_are_other_ops(name):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            given = {"addmm": (x, x, self.w), "addmv": (x[0], x, self.w[0]), "addbmm": (x, x[None], self.w[None])}
            return getattr(torch, name)(*given[name], beta=0.5, alpha=2)

    programs = [autoshard.capture(Net(), torch.zeros(4, 4), frontend=each) for each in ("torch_xla", "torchax")]
    ours, theirs = ([op.name for op in program.ops] for program in programs)
    assert ours == theirs
    assert f"aten.{name}.default" not in ours
