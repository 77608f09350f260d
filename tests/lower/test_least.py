"""Few annotations do what all of them do, by the model of propagation; compilers are asked in benchmarks."""

from dataclasses import replace

import pytest
import torch

from autoshard.api import plan_program
from autoshard.cost.partitioner.propagate import propagate
from autoshard.frontends.torch_xla.program import capture
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.lower.least import least
from autoshard.mesh import Mesh
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.random_plans import random_annotations
from tests.frontends.models import Mlp, mean_square, sample

MESH = Mesh((2, 4), ("data", "model"))


@pytest.fixture(scope="module")
def program():
    with torch.device("meta"):
        model = Mlp()
    return capture(model, sample(), loss_fn=mean_square, optimizer=lambda all_of: torch.optim.AdamW(all_of, lr=1e-3))


@pytest.fixture(scope="module")
def graph(program):
    return build_graph(program)


def runs(graph, annotations):
    """How every op reads and makes its values."""
    found = propagate(graph, annotations, MESH)
    reads = [found.read(op.id, value) for op in graph.ops for value in op.operands]
    made = [found.made[Value(op.id, i)] for op in graph.ops for i in range(len(op.results))]
    return reads, made, [found.read(None, value) for value in graph.outputs]


@pytest.mark.parametrize("seed", range(6))
def test_every_op_runs_and_reads_as_under_all_annotations_and_no_pin_is_needless(graph, seed):
    full = random_annotations(graph, MESH, seed)
    few = least(graph, full, MESH)
    assert few.pins.items() < full.pins.items()
    assert few.copies == full.copies
    wanted = runs(graph, full)
    assert runs(graph, few) == wanted
    before = propagate(graph, full, MESH)
    for value in few.pins:
        if value.op not in graph.arguments and before.read(None, value) == before.made[value]:
            without = {other: spec for other, spec in few.pins.items() if other != value}
            assert runs(graph, Annotations(without, few.copies)) != wanted


def test_copies_keep_their_hops(graph):
    full = random_annotations(graph, MESH, 0)
    (value, _), spec = next(iter(full.copies.items()))
    hop = tuple(() for _ in spec)
    full = replace(full, hops={(value, spec): (hop,)})
    assert least(graph, full, MESH).hops == full.hops


def test_a_plan_may_carry_the_least_annotations_and_costs_the_same(program):
    full = plan_program(program, MESH, rivals=False)
    few = plan_program(program, MESH, annotations="least", rivals=False)
    assert len(few.activations) < len(full.activations) / 2
    assert few.predicted.step_time_s == pytest.approx(full.predicted.step_time_s, rel=1e-6)
    assert few.parameters == full.parameters
    with pytest.raises(ValueError, match="annotations are all or least, not 'some'"):
        plan_program(program, MESH, annotations="some")
