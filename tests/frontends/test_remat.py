"""The switch `remat:…`: blocks of a model recomputed in the backward pass, in place of the checkpoints it has."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import autoshard
from autoshard.cost.partitioner.passes.recomputed import recomputed_ops
from autoshard.frontends.switches.remat import blocks_of, recompute
from autoshard.frontends.switches.table import active
from autoshard.plans.remat import LEVELS, remat_of, switch_value
from autoshard.stablehlo.reader import build_graph
from tests.conftest import FRONTENDS
from tests.frontends.test_checkpoints import Net, each, mean_square, plain, products

CHECKPOINTS = {"none": plain, "not reentrant": each, "reentrant": partial(each, use_reentrant=True)}
PATHS = some.sampled_from([f"{prefix}.{i}" for prefix in ("layers", "down.blocks") for i in range(12)] + ["stem"])


@given(some.dictionaries(PATHS, some.sampled_from(LEVELS)))
def test_a_switch_says_what_is_recomputed(remat):
    assert remat_of(switch_value(remat)) == remat


def test_runs_of_blocks_are_said_by_their_ends():
    remat = {f"layers.{i}": "all" if i < 4 else "products" for i in range(7)} | {"stem": "all"}
    assert switch_value(remat) == "products=layers.4-6;all=layers.0-3,stem"
    assert switch_value({}) == "none"
    with pytest.raises(ValueError, match=r"'everything=layers.0' is not LEVEL=BLOCKS"):
        remat_of("everything=layers.0")


def test_equal_children_of_a_container_are_blocks():
    stage = [torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(n, n)) for _ in range(2))) for n in (4, 8)]
    model = torch.nn.ModuleDict({"stages": torch.nn.ModuleList(stage), "net": Net(plain)})
    assert blocks_of(model) == (
        ("stages.0.0", "stages.0.1"),
        ("stages.1.0", "stages.1.1"),
        ("net.blocks.0", "net.blocks.1"),
    )


def captured(run, frontend, remat):
    torch.manual_seed(0)
    program = autoshard.capture(Net(run), (torch.randn(8, 4, 8),), loss_fn=mean_square, frontend=frontend, remat=remat)
    return program, build_graph(program)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize(
    ("remat", "again", "barriers"),
    [({}, 0, False), ({"blocks.1": "all"}, 1, True), ({"blocks.0": "all", "blocks.1": "products"}, 1, True)],
)
def test_blocks_are_recomputed_as_told_whatever_the_model_does(frontend, run, remat, again, barriers):
    program, graph = captured(run, frontend, remat)
    assert program.switches[-1] == f"remat:{switch_value(remat)}"
    assert len(products(graph)) == 14 + again
    assert len(recomputed_ops(graph).intersection(products(graph))) == again
    assert any(op.kind == "optimization_barrier" for op in graph.ops) == barriers


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_recomputed_ops_are_their_modules(frontend):
    """Their module is not running in the backward pass, and its own call is not repeated."""
    program, graph = captured(plain, frontend, {"blocks.1": "all"})
    again = recomputed_ops(graph)
    assert {graph.ops[number].module for number in again} == {"blocks.1", "blocks.1.up"}
    assert program.fingerprint != captured(plain, frontend, {})[0].fingerprint


def test_a_block_that_a_model_lacks_is_named():
    with pytest.raises(ValueError, match=r"remat:all=blocks.7: the model has no module blocks.7"):
        captured(plain, FRONTENDS[0], {"blocks.7": "all"})


def test_a_model_is_left_as_it_was():
    model = Net(plain)
    with active(["remat:all=blocks.0"], model):
        assert "forward" in vars(model.blocks[0])
    assert "forward" not in vars(model.blocks[0])


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.norm(self.layer(x)).relu() - self.mean


@pytest.mark.parametrize("level", LEVELS)
def test_buffers_are_updated_once_and_read_as_in_the_first_pass(level):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Counts(), Counts())
    reference = torch.nn.Sequential(Counts(), Counts())
    reference.load_state_dict(model.state_dict())
    recompute(model, {"0": level, "1": level})
    for _ in range(2):
        x = torch.randn(8, 4)
        for each_one in (model, reference):
            each_one(x).square().sum().backward()
    for (name, ours), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda said, name=name: f"{name}: {said}")
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
