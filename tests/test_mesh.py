import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.mesh import (
    AxisPart,
    Mesh,
    as_spec,
    default_axis_names,
    format_spec,
    orders,
    parse_axes,
    parse_spec,
    part_of,
    replicated,
    spec_axes,
)

NAMES = ("data", "model", "z")


@st.composite
def specs(draw, axes=NAMES, rank=None):
    rank = draw(st.integers(0, 4)) if rank is None else rank
    dims = [[] for _ in range(rank)]
    if rank:
        for axis in draw(st.permutations(axes)):
            place = draw(st.integers(-1, rank - 1))
            if place >= 0:
                dims[place].append(axis)
    return tuple(tuple(dim) for dim in dims)


@given(specs())
def test_a_spec_is_read_as_it_is_written(spec):
    assert parse_spec(format_spec(spec)) == spec
    assert as_spec([list(dim) for dim in spec]) == spec


def test_the_forms_of_a_spec():
    assert parse_spec("[data],[]") == (("data",), ())
    assert parse_spec(" [a+b] , [ ]") == (("a", "b"), ())
    assert parse_spec("[a,b],[]") == (("a", "b"), ())
    assert parse_spec("") == ()
    assert as_spec((None, "data", ("x", "y"))) == ((), ("data",), ("x", "y"))
    assert replicated(2) == ((), ())
    assert spec_axes((("x",), (), ("y", "z"))) == {"x", "y", "z"}


@pytest.mark.parametrize("text", ["data", "[data", "[data],", "[[data]]", "[data] []", "(data)"])
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(ValueError, match=r"one bracketed axis list per dim, such as \[data\],\[\]"):
        parse_spec(text)


def test_a_mesh_knows_its_sizes():
    mesh = Mesh.parse("2x4x3", "a,b,c", "tpu-v5e")
    assert (mesh.size, mesh.axis_size("b"), mesh.ways(("a", "c")), mesh.ways(())) == (24, 4, 6, 1)
    assert mesh.in_order({"c", "a"}) == ("a", "c")
    assert mesh.shard_shape((5, 8, 7), (("b",), ("a", "c"), ())) == (2, 2, 7)
    assert Mesh((8,)).axis_names == ("data",)
    assert default_axis_names(4) == ("data", "model", "z", "w")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_shards_hold_the_tensor(shape, data):
    mesh = Mesh(tuple(shape))
    spec = data.draw(specs(mesh.axis_names, 2))
    whole = tuple(data.draw(st.integers(1, 40)) for _ in range(2))
    for size, part, axes in zip(whole, mesh.shard_shape(whole, spec), spec, strict=True):
        assert size <= part * mesh.ways(axes) < size + mesh.ways(axes)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 4), ("x", "x"), "axis names must differ: x is used more than once"),
        ((2, 4), ("x",), r"mesh shape \(2, 4\) has 2 axes but 1 names: x"),
        ((2, 0), (), r"at least one device: shape \(2, 0\)"),
        ((1, 2, 3, 4, 5), (), "one to four axes, not 5"),
        ((), (), "one to four axes, not 0"),
        ((2,), ("my axis",), "letters, digits and underscores, not 'my axis'"),
    ],
)
def test_what_is_no_mesh_is_refused(shape, names, message):
    with pytest.raises(ValueError, match=message):
        Mesh(shape, names)


def test_of_four_axes_neighbours_share_a_dim():
    four = Mesh((2, 4, 4, 2)).split_axes
    assert list(orders(("z", "model"), four)) == [("model", "z")]
    assert list(orders(("data", "z"), four)) == []
    assert list(orders((), four)) == [()]
    three = Mesh((2, 1, 4, 2)).split_axes
    assert set(orders(("data", "w"), three)) == {("data", "w"), ("w", "data")}


@pytest.mark.parametrize("text", ["2x", "x2", "2*4", "", "two", "-1x2"])
def test_a_shape_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="numbers joined by x, such as 2x4"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((("data",),), r"w has 2 dims, but the spec \[data\] has 1"),
        ((("nodes",), ()), "w: no mesh axis is called 'nodes'; the mesh has data, model"),
        ((("data",), ("data",)), "w: axis 'data' appears twice"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        Mesh((2, 4)).check(spec, (8, 8), "w")


def test_axis_groups_read_as_they_are_written():
    group = ("data", AxisPart(("model",), 2, 4), AxisPart(("data", "model"), 2))
    assert [str(each) for each in group] == ["data", "model[2/4]", "data~model[2]"]
    assert parse_axes(map(str, group)) == group
    assert sorted(group) == [group[0], group[2], group[1]]


def test_what_an_axis_group_spans():
    mesh = Mesh((2, 4, 8))
    assert part_of("model", 4, 4) == "model"
    group = (part_of("model", 2, 4), "data")
    assert mesh.group_size(group) == 4
    assert mesh.spanned(group) == ("data", "model")
    assert mesh.spanned((AxisPart(("data", "z"), 4),)) == ("data", "z")
