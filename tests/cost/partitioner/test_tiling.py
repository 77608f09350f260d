import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.partitioner.tiling import Subaxes
from autoshard.mesh import Mesh

MESH = Mesh((2, 4), ("data", "model"))
SUBAXES = Subaxes(MESH)
DATA, MAJOR, MINOR = 0, 1, 2  # `model` of 4 devices is two subaxes of 2


def held(subaxes, shape, tiling, device):
    """The flat indices of a tensor that one device holds (dims divide evenly)."""
    place, rest = [], device
    for size in reversed(subaxes.sizes):
        place.append(rest % size)
        rest //= size
    place.reverse()
    ranges = []
    for size, axes in zip(shape, tiling, strict=True):
        index = 0
        for axis in axes:
            index = index * subaxes.sizes[axis] + place[axis]
        part = size // subaxes.ways(axes)
        ranges.append(range(index * part, (index + 1) * part))
    return set(np.ravel_multi_index(np.array(list(itertools.product(*ranges))).T, shape).tolist())


def tilings(rank):
    """Tilings of `rank` dims over the subaxes of MESH."""

    def build(places, order):
        dims = [[] for _ in range(rank)]
        for axis in order:
            if places[axis] < rank:
                dims[places[axis]].append(axis)
        return tuple(map(tuple, dims))

    places = st.lists(st.integers(0, rank), min_size=3, max_size=3)
    return st.builds(build, places, st.permutations(range(3)))


def test_axes_are_broken_into_primes():
    subaxes = Subaxes(Mesh((6, 4), ("a", "b")))
    assert subaxes.sizes == [2, 3, 2, 2]
    assert subaxes.tiling((("b",), ("a",))) == ((2, 3), (0, 1))
    assert subaxes.spec(((2, 3), (0, 1))) == (("b",), ("a",))


def test_a_part_of_an_axis_has_no_name():
    assert SUBAXES.spec(((MAJOR,), (DATA,))) == ((), ("data",))
    assert SUBAXES.spec(((MINOR, MAJOR), ())) == ((), ())
    assert SUBAXES.spec(((MAJOR, MINOR), (DATA,))) == (("model",), ("data",))


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        ((16, 768), (16, 12, 64), (("data",), ("model",)), (("data",), ("model",), ())),
        ((16, 12, 64), (16, 768), ((), ("model",), ()), ((), ("model",))),
        ((16, 12, 64), (192, 64), (("data",), (), ("model",)), (("data",), ("model",))),
        ((16, 1, 8), (16, 8), (("data",), (), ("model",)), (("data",), ("model",))),
        ((16, 12), (192,), ((), ("model",)), ((),)),
        ((7, 8), (7, 2, 4), (("data",), ("data",)), ((), ("data",), ())),
    ],
)
def test_shardings_pass_through_reshapes(source, target, before, after):
    if before[0] == before[-1] != ():  # an axis is on one dim only; the first stays whole
        before = ((), before[1])
    assert SUBAXES.reshape(source, target, SUBAXES.tiling(before)) == SUBAXES.tiling(after)


def test_heads_that_do_not_divide_take_a_part_of_the_axes():
    # 12 heads over 8 devices: 4 ways on the heads, and 2 copies.
    assert SUBAXES.reshape((768,), (12, 64), ((DATA, MAJOR, MINOR),)) == ((DATA, MAJOR), ())


SHAPES = [(16, 8), (128,), (8, 2, 8), (2, 64), (16, 8, 1), (4, 4, 8)]


@given(st.sampled_from(SHAPES), st.sampled_from(SHAPES), st.data())
def test_a_reshaped_sharding_moves_nothing(source, target, data):
    before = data.draw(tilings(len(source)))
    if any(size % SUBAXES.ways(axes) for size, axes in zip(source, before, strict=True)):
        return
    after = SUBAXES.reshape(source, target, before)
    for device in range(MESH.size):
        assert held(SUBAXES, source, before, device) <= held(SUBAXES, target, after, device)


@given(tilings(2), tilings(2))
def test_refining_is_what_it_says(fine, coarse):
    shape = (16, 8)
    inside = all(
        held(SUBAXES, shape, fine, device) <= held(SUBAXES, shape, coarse, device) for device in range(MESH.size)
    )
    assert SUBAXES.refines(shape, fine, coarse) == inside


@given(tilings(2), tilings(2))
def test_merging_refines_both(one, other):
    merged = SUBAXES.merge(one, other, 1)
    if merged is None:
        return
    shape = (16, 8)
    assert SUBAXES.refines(shape, merged, one)
    assert SUBAXES.refines(shape, merged, other)
    assert SUBAXES.tiles(merged) <= MESH.size


def test_a_sharding_gives_way_to_a_finer_one_only():
    shape = (16, 8)
    rows, columns, both = (((DATA,), ()), ((), (MAJOR, MINOR)), ((DATA,), (MAJOR, MINOR)))
    assert SUBAXES.improve(shape, None, rows, False, False) == rows
    assert SUBAXES.improve(shape, ((), ()), rows, False, False) == rows
    assert SUBAXES.improve(shape, rows, both, False, False) == both
    assert SUBAXES.improve(shape, rows, columns, False, False) is None, "more tiles, but across"
    assert SUBAXES.improve(shape, rows, columns, False, True) == columns
    assert SUBAXES.improve(shape, rows, columns, True, False) == both
    assert SUBAXES.improve(shape, both, rows, True, True) is None


def test_uneven_tiles_refine_where_they_lie_inside():
    # 50257 rows: eight tiles of 6283 do not fit into two of 25129.
    assert not SUBAXES.refines((50257,), ((DATA, MAJOR, MINOR),), ((DATA,),))
    assert SUBAXES.refines((50256,), ((DATA, MAJOR, MINOR),), ((DATA,),))
    assert math.prod(SUBAXES.shard((50257,), ((DATA,),))) == 25129
