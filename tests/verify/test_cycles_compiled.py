"""What libtpu estimates of programs that it really compiles to the end, in seconds."""

import itertools

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.graph.annotations import Annotations
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import compare_compiled
from autoshard.verify.compile import compile_module
from autoshard.verify.cycles import compiled_cycles
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.targets import TargetError, parse_target
from tests.verify.small import X, program

TARGET = "tpu-v5e:2x2"
TYPE = "tensor<1024x1024xbf16>"
LAYERS = 4


@pytest.fixture(scope="module", autouse=True)
def libtpu():
    try:
        parse_target(TARGET).packages()
    except TargetError as error:
        pytest.skip(str(error))


def layer(read, made):
    """Two products: the second is written where the first was read, so that a loop has nothing to copy."""
    return f"""  %up{made} = stablehlo.dot %{read}, %w : ({TYPE}, {TYPE}) -> {TYPE}
  %h{made} = stablehlo.tanh %up{made} : {TYPE}
  %{made} = stablehlo.dot %h{made}, %w : ({TYPE}, {TYPE}) -> {TYPE}
"""


def unrolled():
    names = ["x", *(f"y{n}" for n in range(LAYERS))]
    return "".join(layer(*each) for each in itertools.pairwise(names)) + f"return %{names[-1]} : {TYPE}"


def loop(start):
    return f"""%first = stablehlo.constant dense<{start}> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %end = stablehlo.constant dense<{start + LAYERS}> : tensor<i32>
  %l:2 = stablehlo.while(%i = %first, %y = %x) : tensor<i32>, {TYPE} cond {{
    %less = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %less : tensor<i1>
  }} do {{
    {layer("y", "z")}
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %z : tensor<i32>, {TYPE}
  }}
  return %l#1 : {TYPE}"""


def cycles(body):
    module = f"module {{ func.func public @main(%x: {TYPE}, %w: {TYPE}) -> {TYPE} {{\n{body}\n}} }}"
    compiled = compile_module(module.encode(), TARGET, whole=True)
    return compiled_cycles(parse_hlo(compiled.hlo_text), load_device(TARGET))


@pytest.mark.parametrize("start", [0, 3])
def test_layers_in_a_loop_take_what_they_take_one_after_the_other(start):
    one_by_one, turning = cycles(unrolled()), cycles(loop(start))
    assert turning.loops == ()
    assert turning.cycles == pytest.approx(one_by_one.cycles, rel=0.1)


def test_a_report_has_cycles_if_they_were_asked_for():
    made, graph = program(batch=1024, inner=512, outer=256)
    chosen, mesh = Annotations({X: (("data", "model"), ())}), Mesh((2, 2), device="tpu-v5e")
    module = annotate(made, graph, chosen, mesh)
    stopped, early = compare_compiled(graph, chosen, mesh, parse_target(TARGET), module)
    report, whole = compare_compiled(graph, chosen, mesh, parse_target(TARGET), module, cycles=True)
    assert (early.path != whole.path, "estimated_cycles" in early.hlo_text) == (True, False)
    assert stopped.cycles is None
    assert report.cycles is not None
    assert report.as_dict()["cycles"]["seconds"] == report.cycles.cycles / 1.5e9
    assert report.as_dict() | {"cycles": None} == stopped.as_dict() | {"cycles": None}


TABLE = """module { func.func public @main(%t: tensor<2000000x32xf32>, %i: tensor<4096x1xi32>) -> tensor<4096x32xf32> {
  %0 = "stablehlo.gather"(%t, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],
    collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 32>}> : (tensor<2000000x32xf32>, tensor<4096x1xi32>) -> tensor<4096x32xf32>
  return %0 : tensor<4096x32xf32> } }"""


def test_what_sparse_cores_do_beside_is_named():
    compiled = compile_module(TABLE.encode(), "tpu-v6e:2x2", whole=True)
    found = compiled_cycles(parse_hlo(compiled.hlo_text), load_device("tpu-v6e:2x2"))
    assert found.without["async custom-call"][0] == 1
    assert found.cycles > 0
