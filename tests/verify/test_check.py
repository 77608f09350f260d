"""`verify_plan` compiles what runs on the target."""

import dataclasses

import pytest
import torch
from torch import nn

from autoshard import manual
from autoshard.api import Plan
from autoshard.frontends.torch_xla.program import capture
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.planning.written import written_plan
from autoshard.sources import Source
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import verify_plan
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.compile import compile_module
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.targets import TargetError, parse_target

BATCH = 32


def check_compiler() -> None:
    """Skip a test where XLA's GPU compiler is not installed."""
    try:
        parse_target("h100:8", 8).packages()
    except TargetError as error:
        pytest.skip(str(error))


def reversed_axes(annotations: Annotations) -> Annotations:
    """The same splits, with the axes of each dim the other way round."""

    def turned(spec):
        return tuple(axes[::-1] for axes in spec)

    return dataclasses.replace(
        annotations,
        pins={value: turned(spec) for value, spec in annotations.pins.items()},
        copies={key: turned(spec) for key, spec in annotations.copies.items()},
    )


def batched(graph: Graph, value: Value) -> bool:
    """Whether a value is an activation, or its gradient."""
    shape = graph.type_of(value).shape
    return len(shape) == 2 and shape[0] == BATCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scattered_over_axes_in_any_order(dtype, monkeypatch):
    """What is compiled for GPUs has shardings as jax writes them, none of torch_xla's lists of devices."""
    check_compiler()
    modules = []

    def kept(module, *arguments, **options):
        modules.append(module)
        return compile_module(module, *arguments, **options)

    monkeypatch.setattr("autoshard.verify.check.compile_module", kept)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)).to(dtype)
    source = Source(
        model,
        (torch.empty(BATCH, 64, dtype=dtype),),
        lambda out: out.square().mean(),
        lambda parameters: torch.optim.AdamW(parameters),
        train=True,
    )
    graph = build_graph(capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer))
    mesh = Mesh((2, 4), device="h100")
    annotations = reversed_axes(manual.fsdp(graph, mesh))
    rows = {value: (mesh.axis_names[::-1], ()) for value in graph.aten_outputs.values() if batched(graph, value)}
    plan = Plan.of(written_plan(graph, mesh, dataclasses.replace(annotations, pins={**rows, **annotations.pins})))
    assert plan.parameters["0.weight"].spec[0] == ("model", "data")

    kinds = {row.kind: row for row in verify_plan(plan, source, "h100:8").fidelity.rows}

    weights = 2 * 64 * 128 * dtype.itemsize
    assert kinds["reduce-scatter"].compiled_bytes == weights
    assert kinds["all-reduce"].compiled_bytes < 64
    assert all(row.predicted_bytes == row.compiled_bytes for row in kinds.values())
    (module,) = modules
    assert b"<=[2,4]T(1,0)" in module
    assert b"0,4,1,5" not in module


SUM = """func.func public @main(%x: tensor<256x64xf32> {mhlo.sharding = "{devices=[8,1]ORDER}"},
    %y: tensor<256x128xf32> {mhlo.sharding = "{devices=[8,1]ORDER}"})
    -> (tensor<64x128xf32> {mhlo.sharding = "{devices=[8,1]ORDER}"}) {
  %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
      : (tensor<256x64xf32>, tensor<256x128xf32>) -> tensor<64x128xf32>
  %1 = stablehlo.custom_call @Sharding(%0) {mhlo.sharding = "{replicated}"}
      : (tensor<64x128xf32>) -> tensor<64x128xf32>
  %2 = stablehlo.custom_call @Sharding(%1) {mhlo.sharding = "{devices=[8,1]ORDER}"}
      : (tensor<64x128xf32>) -> tensor<64x128xf32>
  return %2 : tensor<64x128xf32>
}"""
"""A gradient that is summed over all devices, then split among them."""


@pytest.mark.parametrize(("order", "kind"), [("<=[2,4]T(1,0)", "reduce-scatter"), ("0,4,1,5,2,6,3,7", "all-reduce")])
def test_a_list_of_devices_in_another_order_keeps_a_sum_whole_on_gpus(order, kind):
    check_compiler()
    compiled = compile_module(SUM.replace("ORDER", order).encode(), "h100:8")
    found = compiled_collectives(parse_hlo(compiled.hlo_text), Mesh((2, 4), device="h100"), "gpu")
    assert [(one.kind, one.bytes) for one in found] == [(kind, 4 * 64 * 128)]
