"""StableHLO files from jax and by hand: names, roles, ties, phases, errors; planned, annotated, compiled, run."""

import json

import jax
import jax.export
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import SourceError
from autoshard.frontends.stablehlo_file import module_path, path_name, read_program
from autoshard.mesh import Mesh
from autoshard.sources import is_stablehlo
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.context import mlir_context
from autoshard.stablehlo.reader import build_graph, parse_module

MESH = Mesh((2, 2))
FORWARD = """
func.func private @twice(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.add %a, %a : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
func.func @main(%x: tensor<8x16xf32>, %w: tensor<16x4xf32>, %s: tensor<f32>) -> tensor<8x4xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
  %1 = call @twice(%0) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %2 = call @twice(%1) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %2 : tensor<8x4xf32>
}
"""  # noqa: E501


def step(state, batch):
    """A step of SGD with momentum on an MLP with named scopes."""

    def loss(params):
        with jax.named_scope("up"):
            hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
        with jax.named_scope("down"):
            return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"w1": of(16, 32), "b1": of(32), "w2": of(32, 16)}
ARGUMENTS = ({"params": PARAMS, "momentum": PARAMS}, {"x": of(8, 16), "y": of(8, 16)})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The step as text, as a portable artifact, and as jax.export serializes it."""
    directory = tmp_path_factory.mktemp("stablehlo")
    jitted = jax.jit(step, donate_argnums=0)
    exported = jax.export.export(jitted, platforms=["cpu"])(*ARGUMENTS)
    (directory / "step.mlirbc").write_bytes(exported.mlir_module_serialized)
    (directory / "step.jax_export").write_bytes(exported.serialize())
    (directory / "step.mlir").write_text(jitted.lower(*ARGUMENTS).as_text(debug_info=True))
    (directory / "forward.mlir").write_text(FORWARD)
    return directory


@pytest.mark.parametrize("name", ["step.mlir", "step.mlirbc", "step.jax_export"])
def test_what_a_file_of_jax_says_of_its_arguments_is_used(files, name):
    program = read_program(files / name)
    assert (program.kind, program.frontend) == ("train", "stablehlo")
    roles = {each.name: each.role for each in program.arguments}
    assert roles == {
        **{f"state.params.{name}": "parameter" for name in PARAMS},
        **{f"state.momentum.{name}": "optimizer_state" for name in PARAMS},
        "batch.x": "input", "batch.y": "input",
    }  # fmt: skip
    assert {each.name: each.of for each in program.arguments if each.of} == {
        f"state.momentum.{name}": f"state.params.{name}" for name in PARAMS
    }
    for output in program.outputs:
        if output.updates is None:
            assert output.role == "loss"
        else:
            assert program.arguments[output.updates].name == output.name
    assert sum(output.updates is not None for output in program.outputs) == 6


def test_phases_and_modules_come_from_names(files):
    program = read_program(files / "step.mlir")
    dots = [(op.module, op.phase) for op in program.ops if op.name == "stablehlo.dot_general"]
    assert dots.count(("up", "forward")) == dots.count(("down", "forward")) == 1
    assert ("up", "backward") in dots
    assert ("down", "backward") in dots
    assert program.ops[-1].phase == "optimizer"


def test_a_plan_of_a_file_keeps_ties_and_reads_back(files, tmp_path):
    program = read_program(files / "step.mlir")
    plan = autoshard.plan_program(program, MESH, hints={"state.params.w1": "[],[model]"})
    assert plan.parameters["state.params.w1"].spec == ((), ("model",))
    plan.save(tmp_path / "plan.json")
    again = autoshard.Plan.load(tmp_path / "plan.json")
    assert again == plan
    again.check_program(read_program(files / "step.mlir"))
    with pytest.raises(autoshard.PlanMismatchError, match="for a training step, this is a forward pass"):
        again.check_program(read_program(files / "forward.mlir"))


def test_calls_are_inlined_and_every_result_can_be_pinned(files):
    program = read_program(files / "forward.mlir")
    assert [op.name for op in program.ops] == ["stablehlo.dot_general", "stablehlo.add", "stablehlo.add"]
    assert [each.role for each in program.arguments] == ["input", "input", "scalar"]
    graph = build_graph(program)
    assert sorted(graph.aten_outputs) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("form", ["gspmd", "shardy"])
def test_an_annotated_file_can_be_planned_again(files, tmp_path, form):
    program = read_program(files / "step.mlir")
    graph = build_graph(program)
    plan = autoshard.plan_program(program, MESH, hints={"state.params.w1": "[],[model]"})
    text = annotate(program, graph, plan.annotations(graph), MESH, form, text=True, partitions=True).decode()
    assert "mhlo.num_partitions = 4" in text
    assert ("mhlo.sharding" in text, "sdy." in text) == (form == "gspmd", form == "shardy")
    assert text.count("sdy.sharding_constraint" if form == "shardy" else "@Sharding") >= len(plan.activations)
    (tmp_path / "annotated.mlir").write_text(text)
    again = read_program(tmp_path / "annotated.mlir")
    assert again.fingerprint == program.fingerprint


def test_another_dimension_number_is_another_program(tmp_path):
    text = """func.func @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {
      %c = stablehlo.constant dense<VALUE> : tensor<8x8xf32>
      %0 = stablehlo.transpose %a, dims = [DIMS] : (tensor<8x8xf32>) -> tensor<8x8xf32>
      %1 = stablehlo.add %0, %c : tensor<8x8xf32>
      return %1 : tensor<8x8xf32>
    }"""

    def fingerprint(dims, value):
        (tmp_path / "net.mlir").write_text(text.replace("DIMS", dims).replace("VALUE", value))
        return read_program(tmp_path / "net.mlir").fingerprint

    assert fingerprint("1, 0", "1.0") == fingerprint("1, 0", "2.0") != fingerprint("0, 1", "1.0")


def test_shardy_and_gspmd_say_the_same(files):
    program = read_program(files / "forward.mlir")
    graph = build_graph(program)
    plan = autoshard.plan_program(program, MESH, hints={"arg0": "[model,data],[]"})
    with mlir_context():
        text = str(parse_module(annotate(program, graph, plan.annotations(graph), MESH, "shardy")))
    assert 'sdy.mesh @mesh = <["data"=2, "model"=2]>' in text
    assert 'sdy.sharding = #sdy.sharding<@mesh, [{"model", "data"}, {}]>' in text


def test_a_file_of_torch_xla_names_its_parameters(files, tmp_path):
    functions = tmp_path / "functions"
    functions.mkdir()
    (functions / "forward.mlir").write_text(FORWARD)
    locations = [{"type_": "input_arg", "position": 0, "name": ""}, {"type_": "parameter", "name": "0.weight"}]
    meta = {"input_locations": [*locations, {"type_": "input_arg", "position": 1, "name": ""}]}
    (functions / "forward.meta").write_text(json.dumps(meta))
    assert is_stablehlo(str(tmp_path))
    program = read_program(tmp_path)
    assert [(each.name, each.role) for each in program.arguments] == [
        ("input0", "input"), ("0.weight", "parameter"), ("input1", "scalar"),
    ]  # fmt: skip


MANUAL = """
module {
  sdy.mesh @mesh = <["d"=8]>
  func.func @main(%x: tensor<16x4xf32>) -> tensor<16x4xf32> {
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"d"}, {}]>] out_shardings=[<@mesh, [{"d"}, {}]>]
        manual_axes={"d"} (%part: tensor<2x4xf32>) {
      %1 = stablehlo.add %part, %part : tensor<2x4xf32>
      sdy.return %1 : tensor<2x4xf32>
    } : (tensor<16x4xf32>) -> tensor<16x4xf32>
    return %0 : tensor<16x4xf32>
  }
}
"""
"""What jax makes of `shard_map`."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"func.func @main(", "is no StableHLO module"),
        (b"ML\xefR\rStableHLO_v9.9.9\0broken", "is a StableHLO artifact that this jaxlib cannot read"),
        (b"\0\1\2\3", "neither an MLIR module nor what jax.export serialized"),
        (b"func.func @other() { return }", "has no function main, only other"),
        (FORWARD.replace("8x", "?x").encode(), "shapes have to be known"),
        (
            FORWARD.replace("%w: tensor<16x4xf32>", "%w: tensor<16x4xf32> {tf.aliasing_output = 0 : i32}").encode(),
            "says that result 0 takes its buffer",
        ),
        (MANUAL.encode(), "split by hand in places"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "bad.mlir").write_bytes(content)
    with pytest.raises(SourceError, match=message) as error:
        read_program(tmp_path / "bad.mlir")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"cannot read .*gone\.mlir: No such file"):
        read_program(tmp_path / "gone.mlir")


@pytest.mark.parametrize(
    ("path", "name"),
    [("params['h'][0].kernel", "params.h.0.kernel"), ("x", "x"), ("", ""), ("result[0]['w']", "result.0.w")],
)
def test_path_name(path, name):
    assert path_name(path) == name


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("jit(step)/transpose(jvp(GPT))/h0/dot_general", "GPT.h0"),
        ("jit(step)/jvp()/mul", ""),
        ("jit(step)/jvp(jit(relu))/max", ""),
        ("", ""),
    ],
)
def test_module_path(name, path):
    assert module_path(name) == path
