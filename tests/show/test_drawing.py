"""Which device holds which part of a tensor, for drawings."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autoshard.mesh import Mesh
from autoshard.show.drawing import holders, tiles

MESH = Mesh((2, 4), ("data", "model"))


def test_rows_and_columns_of_a_matrix_split_both_ways():
    grid = tiles((("data",), ("model",)), MESH)
    assert grid.dims == (0, 1)
    assert grid.devices == (((0,), (1,), (2,), (3,)), ((4,), (5,), (6,), (7,)))


def test_the_major_axis_of_a_dim_comes_first():
    assert tiles((("model", "data"), ()), MESH).devices == (
        ((0,),), ((4,),), ((1,),), ((5,),), ((2,),), ((6,),), ((3,),), ((7,),),
    )  # fmt: skip


def test_a_whole_tensor_is_one_part_that_all_hold():
    grid = tiles(((), ()), MESH)
    assert grid.devices == ((tuple(range(8)),),)
    assert holders(grid.devices[0][0], 8) == "all"


def test_a_vector_lies_along_the_columns():
    assert tiles((("data",),), MESH).devices == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert tiles((), MESH).dims == (None, None)


def test_split_dims_are_drawn_rather_than_whole_ones():
    assert tiles((("data",), (), (), ("model",)), MESH).dims == (0, 3)
    assert tiles(((), ("data",), (), ()), MESH).dims == (1, 3)


@given(st.data())
def test_every_device_holds_one_part_and_parts_are_held_alike(data):
    mesh = Mesh(tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))))
    axes = data.draw(st.permutations(mesh.axis_names))
    rank = data.draw(st.integers(1, 4))
    dims = [data.draw(st.none() | st.integers(0, rank - 1)) for _ in axes]
    spec = tuple(tuple(axis for axis, at in zip(axes, dims, strict=True) if at == dim) for dim in range(rank))
    grid = tiles(spec, mesh)
    cells = list(itertools.chain.from_iterable(grid.devices))
    assert sorted(itertools.chain.from_iterable(cells)) == list(range(mesh.size))
    assert len({len(cell) for cell in cells}) == 1
    assert len(cells) == mesh.ways(axis for dim in spec for axis in dim)


def test_who_holds_a_part_is_said_shortly():
    assert holders((0, 4), 8) == "0 4"
    assert holders((0, 1, 2, 3), 8) == "0–3"
    assert holders((0, 2, 4, 6, 8), 16) == "0 2 … (5)"
