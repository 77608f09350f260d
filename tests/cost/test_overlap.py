"""What runs beside kernels in the overlapped step time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import autoshard
from autoshard.cost import overlap
from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import END
from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.device import load_device
from autoshard.cost.overlap import as_scheduled, overlapped
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


@pytest.mark.parametrize(
    ("device", "taken", "step"),
    [
        ("h100", 0.5, 2 + 0.5 * 20 / 132),  # hidden, but for the multiprocessors that it takes
        ("h100", 100.0, 101 + 1 * 20 / 132),
        ("h100+slop0", 0.5, 2.5),
    ],
)
def test_a_sum_is_hidden_by_what_runs_before_its_end(
    monkeypatch: pytest.MonkeyPatch, device: str, taken: float, step: float
) -> None:
    """A kernel, the start of a sum, another kernel, its end."""
    monkeypatch.setattr(overlap, "collective_seconds", lambda collectives, *_: [taken] * len(collectives))
    moved = Collective("all-reduce", ("x",), 1, op=0)
    kernels = [
        Kernel((0,), (0,), (1,), "add", 0),
        Kernel((1,), (1,), (2,), "all-reduce", 1),
        Kernel((0,), (0,), (3,), "add", 2),
        *([Kernel((), (1, 2), (), END, 3)] if "slop0" not in device else []),
    ]
    steps = [SimpleNamespace(collective=None), SimpleNamespace(collective=moved)]
    program = SimpleNamespace(steps=steps, graph=SimpleNamespace(runs=lambda op: 1))
    made = SimpleNamespace(program=program, kernels=kernels, collectives=(moved,))
    found = as_scheduled(made, [1.0, 0.0, 1.0, 0.0][: len(kernels)], Mesh((8,), ("x",)), load_device(device))  # type: ignore[arg-type]
    assert found == pytest.approx(step)


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
    if name in ("fsdp", "dp") and device == "h100:8":
        assert found.overlapped_s < found.step_time_s * (1 - 1e-3)
    if name in ("fsdp", "dp") and device == "tpu-v5e:2x4":  # FSDP gathers where the product reads, in line
        assert found.overlapped_s == pytest.approx(found.step_time_s)


def test_xla_overlaps_nothing_on_gpus_before_hopper() -> None:
    assert load_device("h100").overlaps
    assert not load_device("a100").overlaps
    assert not load_device("h100+slop0").overlaps
