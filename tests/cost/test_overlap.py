"""What runs beside kernels in the overlapped step time."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.device import load_device
from autoshard.cost.overlap import overlapped
from autoshard.cost.predict import predict
from autoshard.graph.groups import fusion_groups
from autoshard.graph.ops import Graph
from autoshard.manual import PLANS
from autoshard.mesh import Mesh
from autoshard.stablehlo.reader import build_graph

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def step() -> Graph:
    """Of two layers under autocast: gradients are cast before the optimizer reads them."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(2)]
        model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    model.forward = torch.autocast("xla", dtype=torch.bfloat16)(model.forward)
    sample = torch.zeros(256, 512)
    return build_graph(
        autoshard.capture(
            model,
            sample,
            loss_fn=lambda out: out.float().square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
    )


def seconds(graph: Graph, collectives: list[Collective], times: list[float]) -> float:
    """The overlapped step of groups of one second each."""
    groups = fusion_groups(graph)
    return overlapped(graph, groups, [1.0] * len(groups.groups), collectives, times, load_device("tpu-v5e"))


def test_weights_are_gathered_ahead(step: Graph) -> None:
    products = [op.id for op in step.ops if op.kind == "dot_general"]
    groups = len(fusion_groups(step).groups)
    first = next(
        op for op, each in zip(step.arguments, step.program.arguments, strict=True) if each.role == "parameter"
    )
    gather = [Collective("all-gather", ("x",), 1, op=first)]
    sums = [Collective("reduce-scatter", ("x",), 1, op=products[-2])]
    assert seconds(step, [], []) == groups
    assert seconds(step, gather, [0.5]) <= groups + 0.5
    assert seconds(step, sums, [0.5]) == groups + 0.5  # libtpu issues sums in line
    between = [Collective("all-reduce", ("x",), 1, op=products[0])]
    assert seconds(step, between, [0.5]) == groups + 0.5


def test_permutes_of_a_windowed_einsum_run_beside_its_product(step: Graph) -> None:
    product = next(op.id for op in step.ops if op.kind == "dot_general")
    groups = len(fusion_groups(step).groups)
    permutes = [Collective("collective-permute", ("x",), 1, count=7, op=product)]
    assert seconds(step, permutes, [0.75]) == groups
    assert seconds(step, permutes, [1.75]) == groups + 0.75


@pytest.mark.parametrize("device", ["tpu-v5e:2x4", "h100:8"])
@pytest.mark.parametrize("name", ["fsdp", "dp", "megatron"])
def test_overlapped_is_between_compute_and_serial(step: Graph, device: str, name: str) -> None:
    mesh = Mesh((8,), ("x",), device=device)
    found = predict(step, PLANS[name](step, mesh), mesh)
    assert found.compute_s <= found.overlapped_s <= found.step_time_s * (1 + 1e-9)
    if name == "fsdp" or (name == "dp" and device == "h100:8"):
        assert found.overlapped_s < found.step_time_s
    if name == "dp" and device == "tpu-v5e:2x4":
        assert found.overlapped_s == pytest.approx(found.step_time_s)
