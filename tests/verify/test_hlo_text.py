import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.mesh import AxisPart, Mesh
from autoshard.verify.hlo_text import (
    ArrayShape,
    aten_index,
    group_axes,
    pair_axes,
    parse_hlo,
    parse_shapes,
    replica_groups,
    source_target_pairs,
)

AXES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "arrays"),
    [
        ("f32[8,128]{1,0}", [("f32", (8, 128), 4096)]),
        ("bf16[16,128,16]{1,2,0:T(8,128)(2,1)S(1)}", [("bf16", (16, 128, 16), 65536)]),
        ("f32[]", [("f32", (), 4)]),
        ("pred[3,0]{1,0}", [("pred", (3, 0), 0)]),
        ("s4[7]{0:E(4)}", [("s4", (7,), 4)]),
        ("f8e4m3fn[4]{0}", [("f8e4m3fn", (4,), 4)]),
        ("(f32[2]{0}, (s32[], u8[3]{0}), token[])", [("f32", (2,), 8), ("s32", (), 4), ("u8", (3,), 3)]),
        ("f32[<=5,2]{1,0}", [("f32", (5, 2), 40)]),
        ("token[]", []),
    ],
)
def test_shapes_and_their_bytes(text, arrays):
    assert [(shape.dtype, shape.dims, shape.bytes) for shape in parse_shapes(text)] == arrays


def test_memory_space_one_is_on_chip_and_three_on_v4():
    assert parse_shapes("f32[8]{0:T(256)S(3)}") == (ArrayShape("f32", (8,), True, 248),)
    assert parse_shapes("f32[8]{0:T(256)S(2)}") == (ArrayShape("f32", (8,), False, 248),)
    assert parse_shapes("f32[8]{0:T(256)S(1)}") == (ArrayShape("f32", (8,), True, 248),)
    assert parse_shapes("f32[8]{0:T(256)}") == (ArrayShape("f32", (8,), False, 248),)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("f32[8]{0}", 32),
        ("f32[]{:T(128)}", 4),
        ("f32[8]{0:T(256)}", 1024),
        ("f32[262144,8]{1,0:T(8,128)}", 262144 * 128 * 4),
        ("f32[262144,8]{0,1:T(8,128)S(1)}", 262144 * 8 * 4),
        ("bf16[3,5,130]{2,1,0:T(8,128)(2,1)}", 3 * 8 * 256 * 2),
        ("f32[2,64,3,3]{1,0,3,2:T(2,128)}", 2 * 128 * 9 * 4),
    ],
)
def test_bytes_with_the_padding_of_tiles(text, stored):
    (shape,) = parse_shapes(text)
    assert shape.stored_bytes == stored
    assert shape.bytes <= stored


def test_instructions_with_tuples_tiles_comments_and_literals():
    module = parse_hlo(
        """HloModule m, num_partitions=4, entry_computation_layout={(f32[2]{0})->f32[2]{0}}

%inner (p0: f32[2], p1: f32[2]) -> f32[2] {
  %p0 = f32[2]{0} parameter(0)
  %p1 = f32[2]{0} parameter(1)
  ROOT %sum.1 = f32[2]{0} add(%p0, %p1), metadata={op_name="op7.8/aten__add (x)"}
}

ENTRY %main.1_spmd (x.1: f32[2]) -> (f32[2], f32[2]) {
  %x.1 = f32[2]{0:T(128)} parameter(0)
  %c = s32[2]{0} constant({1, 2})
  %t = (f32[2]{0:T(128)(2,1)}, /*index=1*/f32[2]{0}) custom-call(%x.1, /*index=1*/%x.1), custom_call_target="f(x)"
  %g = f32[2]{0} get-tuple-element((f32[2]{0:T(128)(2,1)}, f32[2]{0}) %t), index=1
  %f = f32[2]{0} fusion(%g, %x.1), kind=kLoop, calls=%inner
  ROOT %r = (f32[2]{0}, f32[2]{0}) tuple(%f, %g)
}
"""
    )
    assert module.num_partitions == 4
    assert list(module.computations) == ["inner", "main.1_spmd"]
    main = module.computations[module.entry]
    assert list(main.instructions) == ["x.1", "c", "t", "g", "f", "r"]
    assert main.instructions["t"].bytes == 16
    assert main.instructions["t"].operands == ("x.1", "x.1")
    assert main.instructions["g"].operands == ("t",)
    assert main.instructions["c"].arguments == "{1, 2}"
    assert main.instructions["c"].operands == ()
    assert main.root.name == "r"
    assert main.instructions["f"].called == ("inner",)
    assert [user.name for user in main.users["g"]] == ["f", "r"]
    inner = module.computations["inner"]
    assert aten_index(inner.root.op_name) == 7
    assert module.callers["inner"][0][1].name == "f"


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("module @m {}")


@pytest.mark.parametrize(
    ("name", "aten"),
    [
        ("op52.53/aten__split", 52),
        ("op3", 3),
        ("op5.out0", 5),
        ("jit(step)/jvp()/while/body/op12/dot_general", 12),
        ("op61.62/aten__view;op60.61/aten__expand", 61),
        ("loop3/add", None),
        ("", None),
    ],
)
def test_aten_op_of_a_label(name, aten):
    assert aten_index(name) == aten


WHILE = """HloModule m, num_partitions=1

%body (p: (s32[])) -> (s32[]) {{
  ROOT %p = (s32[]) parameter(0)
}}

%condition (p: (s32[])) -> pred[] {{
  %p = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant({bound})
  ROOT %less = pred[] compare(%i, %n), direction={direction}
}}

ENTRY %main (p: (s32[])) -> (s32[]) {{
  %p = (s32[]) parameter(0)
  %two = s32[] constant(2)
  %copied = s32[] copy(%two)
  %from_two = (s32[]) tuple(%copied)
  ROOT %loop = (s32[]) while(%{start}), condition=%condition, body=%body{config}
}}
"""


@pytest.mark.parametrize(
    ("config", "direction", "start", "trips"),
    [
        (', backend_config={"known_trip_count":{"n":"12"},"other":{}}', "LT", "p", 12),
        ("", "LT", "p", 5),
        ("", "LT", "from_two", 3),
        ("", "NE", "p", None),
    ],
)
def test_trip_counts(config, direction, start, trips):
    module = parse_hlo(WHILE.format(bound=5, direction=direction, config=config, start=start))
    assert module.trip_count(module.computations["main"].root) == trips


@st.composite
def meshes_and_axes(draw):
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3)))
    mesh = Mesh(shape, AXES[: len(shape)])
    axes = draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    return mesh, mesh.in_order(axes)


def groups_along(mesh, axes):
    """Groups of devices that differ in `axes` only, as a matrix."""
    ids = np.arange(mesh.size).reshape(mesh.shape)
    moved = [mesh.axis_names.index(axis) for axis in axes]
    rest = [dim for dim in range(len(mesh.shape)) if dim not in moved]
    return ids.transpose(rest + moved).reshape(-1, mesh.ways(axes)), rest + moved


@given(meshes_and_axes())
def test_every_form_of_replica_groups_names_the_same_axes(mesh_and_axes):
    mesh, axes = mesh_and_axes
    groups, permutation = groups_along(mesh, axes)
    explicit = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in groups.tolist()) + "}"
    sizes = ",".join(map(str, mesh.shape))
    iota = f"[{','.join(map(str, groups.shape))}]<=[{sizes}]T({','.join(map(str, permutation))})"
    named = ",".join(f"'{name}'={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
    by_name = f"mesh[{named}] {{{','.join(repr(axis) for axis in axes)}}}"
    for form in (explicit, iota, by_name):
        found = replica_groups(f", channel_id=1, replica_groups={form}, dimensions={{0}}", mesh.size)
        assert {frozenset(group) for group in found} == {frozenset(row) for row in groups.tolist()}
        assert group_axes(found, mesh) == axes


def test_no_groups_are_all_devices():
    for text in (", to_apply=%add", ", replica_groups={}, to_apply=%add"):
        assert replica_groups(text, 4) == [(0, 1, 2, 3)]


def test_iota_without_a_permutation_and_over_a_part_of_a_named_axis():
    assert replica_groups("replica_groups=[2,4]<=[8]", 8) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    half = replica_groups("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", 8)
    assert half == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_an_unknown_form_of_groups_is_refused():
    with pytest.raises(ValueError, match="unknown form of replica groups"):
        replica_groups("replica_groups=everyone", 8)


def test_groups_along_a_part_of_an_axis_and_along_no_grid_say_so():
    mesh = Mesh((2, 4), ("data", "model"))
    assert group_axes([(0, 1), (2, 3), (4, 5), (6, 7)], mesh) == (AxisPart(("model",), 2, 4),)
    assert group_axes([(0, 2, 4, 6), (1, 3, 5, 7)], mesh) == ("data", AxisPart(("model",), 2, 4))
    assert group_axes([(0, 5), (1, 4), (2, 7), (3, 6)], mesh) == (AxisPart(("data", "model"), 2),)


def test_permutes_run_along_the_axes_that_change():
    mesh = Mesh((2, 4), ("data", "model"))
    pairs = source_target_pairs(", source_target_pairs={{0,1},{1,2},{4,5}}, metadata={}")
    assert pairs == [(0, 1), (1, 2), (4, 5)]
    assert pair_axes(pairs, mesh) == ("model",)
    assert pair_axes([(0, 4)], mesh) == ("data",)
    assert pair_axes([(0, 5)], mesh) == ("data", "model")


@pytest.mark.parametrize(("step", "trips"), [(1, 4), (2, 2), (3, 2)])
def test_an_unrolled_loop_counts_in_larger_steps(step: int, trips: int) -> None:
    """A TPU's windowed product: two turns of `i < 4` in one body, `i += 2`, and no known trip count."""
    module = parse_hlo(f"""HloModule m

%body (p: (f32[8], u32[])) -> (f32[8], u32[]) {{
  %p = (f32[8], u32[]) parameter(0)
  %a = f32[8] get-tuple-element(%p), index=0
  %i = u32[] get-tuple-element(%p), index=1
  %by = u32[] constant({step})
  %next = u32[] add(%i, %by)
  ROOT %t = (f32[8], u32[]) tuple(%a, %next)
}}

%cond (q: (f32[8], u32[])) -> pred[] {{
  %q = (f32[8], u32[]) parameter(0)
  %n = u32[] get-tuple-element(%q), index=1
  %four = u32[] constant(4)
  ROOT %less = pred[] compare(%n, %four), direction=LT
}}

ENTRY %main (x: (f32[8], u32[])) -> (f32[8], u32[]) {{
  %x = (f32[8], u32[]) parameter(0)
  ROOT %w = (f32[8], u32[]) while(%x), condition=%cond, body=%body
}}
""")
    assert module.trip_count(module.computations["main"].root) == trips
