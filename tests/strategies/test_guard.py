"""Convolutions that XLA would sum over idle devices too are read whole in space; indices that libtpu pads, whole."""

import dataclasses
import tempfile
from pathlib import Path

import pytest

from autoshard.api import Plan
from autoshard.cost.machine.device import load_device
from autoshard.frontends.stablehlo_file import read_program
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.lower.torch_xla.mark_sharding import _warn_of_wrong_sums as warn_of_wrong_sums
from autoshard.mesh import Mesh
from autoshard.planning.written import written_plan
from autoshard.program import AtenOp
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.formulate import formulate
from autoshard.strategies.guard import (
    UncompilableError,
    WrongNumbersError,
    WrongSumsWarning,
    guarded,
    overcounted,
    padded_indices,
    spread_indices,
)
from autoshard.strategies.space import plain
from autoshard.verify.compile import CompileError, compile_module
from tests.cost.zoo import WINDOWS, program
from tests.graph.helpers import program_from_text

MESH = Mesh((2, 4), ("data", "model"))
WHOLE, IN_SPACE, IMAGES = ((), (), (), ()), ((), (), ("data",), ()), (("data",), (), (), ())


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [  # each compiles to numbers that are four times too large
        ("conv", IN_SPACE, (("model",), (), (), ())),
        ("conv_weight", IN_SPACE, IN_SPACE),
        ("depthwise_weight", IMAGES, IMAGES),
    ],
)
def test_a_sum_over_idle_devices_is_found_and_avoided(name, first, second):
    _, graph = program([name], WINDOWS)
    annotations = Annotations({Value(0): first, Value(1): second})
    assert list(overcounted(graph, annotations, MESH).values()) == [(first, second)]
    said = r"wrong numbers under this plan: it sums convolution op \d+ in"
    with pytest.warns(WrongSumsWarning, match=said):
        plan = Plan.of(written_plan(graph, MESH, annotations))
    loaded = Plan.from_json(plan.to_json())
    assert loaded.wrong_sums == plan.wrong_sums != ()
    with pytest.warns(WrongSumsWarning, match=said):
        warn_of_wrong_sums(loaded)
    safe = guarded(graph, annotations, MESH)
    assert Plan.of(written_plan(graph, MESH, safe)).wrong_sums == ()  # warnings are errors here
    assert overcounted(graph, safe, MESH) == {}
    assert safe.pins == annotations.pins
    assert safe.copies[Value(0), 0] == WHOLE


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("conv", (("model",), (), ("data",), ()), WHOLE),
        ("conv_weight", (("model",), (), ("data",), ()), (("model",), (), ("data",), ())),
        ("sum", ((), ()), ((), ())),
    ],
)
def test_what_is_right_is_left_alone(name, first, second):
    _, graph = program([name], WINDOWS) if name in WINDOWS else program([name])
    annotations = Annotations({Value(0): first, Value(1): second})
    assert guarded(graph, annotations, MESH) == annotations


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("name", ["depthwise_weight", "grouped_weight", "conv_weight"])
def test_no_strategy_sums_over_idle_devices(name, device):
    _, graph = program([name], WINDOWS)
    mesh = Mesh((2, 4), ("data", "model"), device)
    found = formulate(graph, mesh, load_device(device))
    convolution = next(op for op in graph.ops if op.kind == "convolution")
    ways = found.strategies[found.groups.of[convolution.id]]
    assert len(ways) > 1
    for number in range(len(ways)):
        pins = {value: plain(ways.inputs[place][number]) for place, value in enumerate(convolution.operands)}
        pins[Value(convolution.id)] = ways.pinned[0][number]
        assert overcounted(graph, Annotations(pins), mesh) == {}


def test_numbers_that_stay_wrong_are_refused_with_the_op():
    _, graph = program(["conv"], WINDOWS)
    graph = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, aten=None) for op in graph.ops))
    annotations = Annotations({Value(0): IN_SPACE, Value(1): (("model",), (), (), ())})
    with pytest.raises(WrongNumbersError, match=r"convolution op \d+ in conv over devices that hold the same part"):
        guarded(graph, annotations, MESH)


PAIRS = """module { func.func public @main(%z: tensor<64x90xf32>, %i: tensor<3xi64>, %u: tensor<64x3xf32>)
    -> tensor<64x90xf32> {
  %s = "stablehlo.scatter"(%z, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [0],
      inserted_window_dims = [1], scatter_dims_to_operand_dims = [1], index_vector_dim = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<64x90xf32>, tensor<3xi64>, tensor<64x3xf32>) -> tensor<64x90xf32> loc("op0")
  return %s : tensor<64x90xf32> } }"""


@pytest.mark.parametrize(
    ("device", "indices", "split", "found"),
    [
        ("tpu-v5e", "i64", (("data",), ("model",)), True),
        ("tpu-v5e", "i32", (("data",), ("model",)), False),
        ("tpu-v5e", "i64", (("data", "model"), ()), False),
        ("cpu", "i64", (("data",), ("model",)), False),
    ],
)
def test_indices_that_libtpu_cannot_pad_are_whole(device, indices, split, found):
    """DLRM's pairs, an odd number of columns: the compiler aborts where propagation splits them."""
    text = PAIRS.replace("i64", indices)
    graph = build_graph(program_from_text(text, ops=[AtenOp(0, "index_put", "", "backward", ())]))
    mesh = dataclasses.replace(MESH, device=device)
    annotations = Annotations({Value(2): split})
    assert bool(padded_indices(graph, annotations, mesh)) == found
    safe = guarded(graph, annotations, mesh)
    assert safe.copies == ({(Value(2), 0): (split[0], ())} if found else {})
    if found:
        pytest.importorskip("libtpu")
        compile_module(annotate(graph.program, graph, safe, mesh), "tpu-v5e:2x4")  # aborts without the copy


@pytest.mark.parametrize(
    ("device", "indices", "split", "found"),
    [
        ("cpu", "i64", ("data", "model"), True),
        ("cpu", "i32", ("data", "model"), False),
        ("cpu", "i64", ("data",), False),
        ("tpu-v5e", "i64", ("data",), True),
        ("tpu-v5e", "i32", ("data",), False),
    ],
)
def test_indices_that_are_spread_unevenly_over_all_devices_or_on_tpus_are_whole(device, indices, split, found):
    """XLA's partitioner aborts on these; annotations that no solver made are refused. WavLM's plan on v5e was one."""
    if device != "cpu":
        pytest.importorskip("libtpu")
    target = f"cpu:{MESH.size}" if device == "cpu" else "tpu-v5e:2x4"
    text = PAIRS.replace("i64", indices)
    graph = build_graph(program_from_text(text, ops=[AtenOp(0, "index_put", "", "backward", ())]))
    mesh = dataclasses.replace(MESH, device=device)
    annotations = Annotations({Value(1): (split,)})
    assert bool(spread_indices(graph, annotations, mesh)) == found
    safe = guarded(graph, annotations, mesh)
    assert not spread_indices(graph, safe, mesh)
    compile_module(annotate(graph.program, graph, safe, mesh), target)
    if found:
        with pytest.raises(UncompilableError, match=r"the compiler would abort on scatter op \d+ .* i64\[3\]"):
            Plan.of(written_plan(graph, mesh, annotations))
        with pytest.raises(CompileError, match="crashed"):
            compile_module(annotate(graph.program, graph, annotations, mesh), target)
    else:
        assert safe == annotations


def test_positions_that_a_sort_splits_are_whole():
    """The gradient of a sort: no argument and no value that takes an annotation makes its positions."""
    jax = pytest.importorskip("jax")

    def step(x):
        return x - jax.grad(lambda x: jax.numpy.sin(jax.lax.sort(x, dimension=1)).sum())(x)

    shape = jax.ShapeDtypeStruct((5, 99, 100), "float32")
    with tempfile.NamedTemporaryFile(suffix=".mlir") as file, jax.enable_x64(True):
        Path(file.name).write_text(jax.jit(step).lower(shape).as_text())
        graph = build_graph(read_program(file.name))
    mesh = Mesh((3,), ("data",), device="cpu")
    split = ((), (), ("data",))
    annotations = Annotations(dict.fromkeys([Value(0), *graph.aten_outputs.values()], split))
    annotations = Annotations({value: split for value in annotations.pins if len(graph.type_of(value).shape) == 3})
    assert spread_indices(graph, annotations, mesh)
    safe = guarded(graph, annotations, mesh)
    assert not spread_indices(graph, safe, mesh)
    assert split in safe.pins.values()
    compile_module(annotate(graph.program, graph, safe, mesh), "cpu:3")
