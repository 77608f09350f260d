"""Memory, FLOPs and traffic that are predicted, against what the compilers lay out for a two-layer training step."""

from __future__ import annotations

from functools import cache

import pytest

from autoshard.cost.compiler.gpu.split_k import Product, split_k
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import Compiled, compile_module
from autoshard.verify.targets import parse_target
from autoshard.verify.work import compiled_work
from tests.graph.helpers import program_from_text

pytest.importorskip("jaxlib")

# One SGD step of `tanh(x a) b` against 0; the updated a and b take over the buffers of the old ones.
TEXT = """module @m {
  func.func @main(%x: tensor<256x512xf32>, %a: tensor<512x2048xf32>, %b: tensor<2048x512xf32>)
      -> (tensor<512x2048xf32>, tensor<2048x512xf32>) {
    %h0 = stablehlo.dot %x, %a : (tensor<256x512xf32>, tensor<512x2048xf32>) -> tensor<256x2048xf32>
    %h = stablehlo.tanh %h0 : tensor<256x2048xf32>
    %y = stablehlo.dot %h, %b : (tensor<256x2048xf32>, tensor<2048x512xf32>) -> tensor<256x512xf32>
    %db = stablehlo.dot_general %h, %y, contracting_dims = [0] x [0]
      : (tensor<256x2048xf32>, tensor<256x512xf32>) -> tensor<2048x512xf32>
    %dh = stablehlo.dot_general %y, %b, contracting_dims = [1] x [1]
      : (tensor<256x512xf32>, tensor<2048x512xf32>) -> tensor<256x2048xf32>
    %hh = stablehlo.multiply %h, %h : tensor<256x2048xf32>
    %m = stablehlo.multiply %dh, %hh : tensor<256x2048xf32>
    %d = stablehlo.subtract %dh, %m : tensor<256x2048xf32>
    %da = stablehlo.dot_general %x, %d, contracting_dims = [0] x [0]
      : (tensor<256x512xf32>, tensor<256x2048xf32>) -> tensor<512x2048xf32>
    %a1 = stablehlo.subtract %a, %da : tensor<512x2048xf32>
    %b1 = stablehlo.subtract %b, %db : tensor<2048x512xf32>
    return %a1, %b1 : tensor<512x2048xf32>, tensor<2048x512xf32>
  }
}"""
WEIGHT = 512 * 2048 * 4
ALL = ("data", "model")
PLANS = {
    "dp": {0: (ALL, ())},
    "fsdp": {0: (ALL, ()), 1: (ALL, ()), 2: (ALL, ())},
}
TARGETS = {"cpu": "cpu", "h100": "h100:8"}


@cache
def both(device: str, plan: str) -> tuple[Prediction, Compiled]:
    """What is predicted and what is compiled."""
    program = program_from_text(TEXT, ["input", "parameter", "parameter"], updates={0: 1, 1: 2})
    graph = build_graph(program)
    mesh = Mesh((2, 4), ALL, device=device)
    annotations = Annotations({Value(op): spec for op, spec in PLANS[plan].items()}, {})
    module = annotate(program, graph, annotations, mesh)
    target = parse_target(TARGETS[device], mesh.size)
    if device == "h100":
        pytest.importorskip("jax_plugins.xla_cuda12")
    return predict(graph, annotations, mesh, load_device(device)), compile_module(
        module, target, donate=donated(program)
    )


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("device", list(TARGETS))
def test_memory_is_what_the_compiler_lays_out(device: str, plan: str) -> None:
    prediction, compiled = both(device, plan)
    made = prediction.compiled
    assert made.argument_bytes == pytest.approx(compiled.memory.argument, rel=0.01)
    # The rest is the table of pointers to the results.
    assert made.output_bytes == 0 <= compiled.memory.output - compiled.memory.alias < 100
    assert prediction.peak_memory_bytes == pytest.approx(compiled.memory.peak, rel=0.05)


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("device", list(TARGETS))
def test_flops_and_traffic_are_the_compiled_ones(device: str, plan: str) -> None:
    prediction, compiled = both(device, plan)
    work = compiled_work(compiled.hlo_text, compiled.target.family)
    assert prediction.compiled.flops == pytest.approx(work.flops, rel=0.001)
    assert prediction.compiled.moved_bytes == pytest.approx(work.bytes, rel=0.15)


def test_on_cpu_all_gradients_and_their_sums_are_in_memory_together() -> None:
    """One all-reduce of all gradients: two operands and two results."""
    prediction, compiled = both("cpu", "dp")
    assert prediction.compiled.temporary_bytes == pytest.approx(4 * WEIGHT, rel=0.02)
    assert compiled.memory.temp == pytest.approx(4 * WEIGHT, rel=0.02)


def test_on_gpu_a_combined_all_reduce_is_one_array_summed_in_place() -> None:
    """The gradients are copied into one array: twice their bytes, and after that the array and its parts."""
    prediction, compiled = both("h100", "dp")
    assert prediction.compiled.temporary_bytes == pytest.approx(compiled.memory.temp, rel=0.1)
    assert compiled.memory.temp < 4 * WEIGHT * 1.02


def test_products_with_few_tiles_are_cut_along_their_contraction() -> None:
    """Parts that XLA chose on an H100 (132 multiprocessors) for products of GPT-2's step."""

    def parts(m: int, n: int, k: int, batch: int = 1) -> tuple[int, int]:
        return split_k(Product(batch, m, n, k, 4, 4, 4), 132, 9.0)

    assert parts(512, 768, 50257) == (8, 50272)  # padded to a multiple of 8 parts of 16 bytes
    assert parts(512, 768, 3072) == (4, 3072)
    assert parts(64, 1024, 4096) == (16, 4096)
    assert parts(512, 3072, 768) == (1, 768)
    assert parts(512, 50257, 768) == (1, 768)
    assert parts(512, 512, 64, batch=12) == (1, 64)
    assert split_k(Product(1, 64, 64, 4096, 4, 4, 4), 0, 0.0) == (1, 4096)
