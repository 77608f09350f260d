import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.frontends.torch_xla.program import capture
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import AnnotationError, annotate, donated, gspmd_sharding
from autoshard.stablehlo.context import mlir_context
from autoshard.stablehlo.reader import build_graph, parse_module
from tests.graph.helpers import program_from_text
from tests.verify.small import MESH, W, X, program

SPLIT_ROWS = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((), "{replicated}"),
        (((), ()), "{replicated}"),
        ((("data",), ()), SPLIT_ROWS),
        ((("data",), ("model",)), "{devices=[2,4]<=[8]}"),
        (((), ("model",)), "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        ((("model",), ("data",)), "{devices=[4,2]<=[2,4]T(1,0)}"),
        ((("data", "model"), ()), "{devices=[8,1]<=[8]}"),
        ((("model", "data"), ()), "{devices=[8,1]<=[2,4]T(1,0)}"),
    ],
)
def test_gspmd_writes_a_sharding_so(spec, expected):
    assert gspmd_sharding(spec, MESH) == expected


def test_axes_of_one_device_make_no_difference():
    mesh = Mesh((2, 1, 4), ("a", "one", "b"))
    assert gspmd_sharding((("one",), ("b", "one")), mesh) == "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert gspmd_sharding((("one",),), mesh) == "{replicated}"


@st.composite
def meshes_and_specs(draw):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    mesh = Mesh(shape, ("a", "b", "c")[: len(shape)])
    axes = draw(st.permutations(mesh.axis_names))
    rank = draw(st.integers(1, 3))
    where = [draw(st.integers(-1, rank - 1)) for _ in axes]
    return mesh, tuple(tuple(axis for axis, dim in zip(axes, where, strict=True) if dim == d) for d in range(rank))


@given(meshes_and_specs())
def test_xla_gives_each_device_the_part_that_the_spec_says(mesh_and_spec):
    from jax._src.lib import xla_client

    mesh, spec = mesh_and_spec
    sharding = xla_client.HloSharding.from_string(gspmd_sharding(spec, mesh))
    if sharding.is_replicated():
        assert mesh.ways(axis for dim in spec for axis in dim) == 1
        return
    tiles = list(sharding.tile_assignment_dimensions())
    devices = np.array(sharding.tile_assignment_devices()).reshape(tiles)
    for place in itertools.product(*(range(size) for size in mesh.shape)):
        device = int(np.ravel_multi_index(place, mesh.shape))
        at = dict(zip(mesh.axis_names, place, strict=True))
        part = [0] * len(spec)
        for dim, axes in enumerate(spec):
            for axis in axes:
                part[dim] = part[dim] * mesh.axis_size(axis) + at[axis]
        assert device in np.atleast_1d(devices[tuple(part)]).reshape(-1)


def written(annotations, mesh=MESH):
    made, graph = program()
    with mlir_context():
        return str(parse_module(annotate(made, graph, annotations, mesh)))


def test_without_annotations_no_marker_is_left():
    text = written(Annotations())
    assert "@Sharding" not in text
    assert text.count("mhlo.sharding") == 1, "the updated weight, replicated as its argument is"


def test_a_cast_is_not_held_whole_by_the_marker_before_it():
    """torch_xla gives a cast its operand's sharding, which at capture is the marker's."""

    class Cast(torch.nn.Module):
        def forward(self, x):
            return (x * 2).to(torch.float32).exp()

    made = capture(Cast(), (torch.zeros(8, 8, dtype=torch.bfloat16),))
    with mlir_context():
        assert "convert" in str(parse_module(made.stablehlo))
        text = str(parse_module(annotate(made, build_graph(made), Annotations(), MESH)))
    assert "mhlo.sharding" not in text


def test_pins_of_arguments_tie_what_updates_them():
    text = written(Annotations({X: (("data",), ()), W: (("data",), ())}))
    signature = next(line for line in text.splitlines() if "@main" in line)
    assert signature.count(SPLIT_ROWS) == 3
    assert "@Sharding" not in text


def test_a_pin_is_what_every_consumer_reads_and_a_copy_stands_behind_it():
    _, graph = program()
    y = graph.aten_outputs[0, 0]
    gradient = graph.aten_outputs[3, 0]
    text = written(
        Annotations(
            {y: (("data",), ()), gradient: ((), ())},
            {(y, 2): (("model", "data"), ()), (gradient, 4): (("data",), ()), (W, 0): ((), ("model",))},
        )
    )
    body = [line.strip() for line in text.split("@main")[1].splitlines()]
    found = [line.split(" : ")[0] for line in body if line.startswith("%")]
    assert found == [
        '%0 = stablehlo.custom_call @Sharding(%arg1) {mhlo.sharding = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"}',  # noqa: E501
        "%1 = stablehlo.dot %arg0, %0",
        f'%2 = stablehlo.custom_call @Sharding(%1) {{mhlo.sharding = "{SPLIT_ROWS}"}}',
        '%3 = stablehlo.custom_call @Sharding(%2) {mhlo.sharding = "{devices=[8,1]<=[2,4]T(1,0)}"}',
        "%4 = stablehlo.tanh %3",
        "%5 = stablehlo.transpose %arg0, dims = [1, 0]",
        "%6 = stablehlo.dot_general %5, %4, contracting_dims = [1] x [0]",
        '%7 = stablehlo.custom_call @Sharding(%6) {mhlo.sharding = "{replicated}"}',
        f'%8 = stablehlo.custom_call @Sharding(%7) {{mhlo.sharding = "{SPLIT_ROWS}"}}',
        "%9 = stablehlo.subtract %arg1, %8",
    ]


def test_equal_copies_are_shared():
    text = written(Annotations({X: (("data",), ())}, {(X, 0): ((), ()), (X, 3): ((), ())}))
    assert text.count("@Sharding(%arg0)") == 1
    assert "stablehlo.dot %0, %arg1" in text
    assert "stablehlo.transpose %0" in text


def test_hops_stand_before_a_copy_and_equal_beginnings_are_shared():
    both, rows = (("data",), ("model",)), (("data",), ())
    chains = {(X, (("data", "model"), ())): (both, rows), (X, ((), ("data",))): (both,)}
    copies = {(X, 0): (("data", "model"), ()), (X, 3): ((), ("data",))}
    text = written(Annotations({X: ((), ("model",))}, copies, chains))
    assert text.count("@Sharding(%arg0)") == 1
    assert text.count("@Sharding(") == 4
    first, *others = [line.strip() for line in text.splitlines() if "@Sharding(" in line]
    assert first.startswith("%0 = ")
    assert "devices=[2,4]<=[8]" in first
    assert sum("@Sharding(%0)" in line for line in others) == 2


def test_the_same_annotations_give_the_same_bytes():
    made, graph = program()
    annotations = Annotations({X: (("data",), ()), graph.aten_outputs[2, 0]: (("data",), ("model",))})
    assert annotate(made, graph, annotations, MESH) == annotate(made, graph, annotations, MESH)


def test_donated_arguments_follow_from_the_outputs():
    assert donated(program()[0]) == {1: 0}


def test_what_cannot_be_annotated_is_refused_by_name():
    _, graph = program()
    y = graph.aten_outputs[0, 0]
    transposed = next(op for op in graph.ops if op.kind == "transpose")
    with pytest.raises(AnnotationError, match=r"transpose \(op \d+\) cannot be annotated: it is neither an argument"):
        written(Annotations({type(y)(transposed.id): ((), ())}))
    with pytest.raises(AnnotationError, match="argument 'w' has 2 dims, but the spec"):
        written(Annotations({W: (("data",),)}))
    with pytest.raises(
        AnnotationError, match=r"output 0 of aten op 0 \(aten.mm\) in net.fc: no mesh axis is called 'z'"
    ):
        written(Annotations({y: (("z",), ())}))
    with pytest.raises(AnnotationError, match="argument 'w' is not read by aten op 2"):
        written(Annotations({}, {(W, 2): ((), ())}))


def test_only_what_is_refused_is_put_in_words(monkeypatch):
    monkeypatch.setattr("autoshard.stablehlo.annotate.describe", lambda *_: pytest.fail("it looks through all outputs"))
    made, graph = program()
    annotate(made, graph, Annotations({X: (("data",), ()), graph.aten_outputs[2, 0]: (("data",), ("model",))}), MESH)


def test_what_a_loop_or_branch_reads_inside_gets_its_copy():
    """jax passes a branch nothing: it reads what is around it."""
    made = program_from_text(
        """
        func.func @main(%arg0: tensor<8x8xf32>, %arg1: tensor<i32>) -> tensor<8x8xf32> {
          %0 = "stablehlo.case"(%arg1) ({
            stablehlo.return %arg0 : tensor<8x8xf32>
          }, {
            %1 = stablehlo.sine %arg0 : tensor<8x8xf32> loc("op0")
            stablehlo.return %1 : tensor<8x8xf32>
          }) : (tensor<i32>) -> tensor<8x8xf32> loc("op0")
          return %0 : tensor<8x8xf32>
        }
        """,
        ops=[AtenOp(0, "case", "", {}, (TensorType((8, 8), "f32"),), "forward")],
    )
    graph = build_graph(made)
    x = Value(graph.arguments[0])
    with mlir_context():
        text = str(parse_module(annotate(made, graph, Annotations({}, {(x, 0): (("data",), ())}), MESH)))
    assert text.count("@Sharding(%arg0)") == 1
    assert "stablehlo.sine %0 " in text
    assert "stablehlo.return %0 " in text
