"""Which device of a runtime stands at which place of a mesh; annotations of tensors with many dims."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch_xla")

from autoshard.lower.torch_xla.runtime import MOST_DIMS, device_ids, fewer_dims
from autoshard.mesh import Mesh


def attached(*shape: int, slices: int = 1, cores: int = 1) -> list[dict[str, Any]]:
    """A TPU runtime's devices as libtpu numbers them: by slice, then z, y, x, and cores innermost."""
    x, y, z = (*shape, 1)[:3]
    places = [
        (s, (i, j, k), c)
        for s in range(slices)
        for k in range(z)
        for j in range(y)
        for i in range(x)
        for c in range(cores)
    ]
    return [
        {"name": f"TPU:{n}", "coords": list(at), "core_on_chip": c} | ({"slice_index": s} if slices > 1 else {})
        for n, (s, at, c) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("mesh", "attributes", "ids"),
    [
        (Mesh((2, 4), device="tpu-v5e"), attached(2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
        (Mesh((8,), device="tpu-v5e"), attached(2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
        (Mesh((4, 2), device="tpu-v5e"), attached(2, 4), (0, 1, 2, 3, 4, 5, 6, 7)),
        (Mesh((2, 4), device="tpu-v5e"), attached(4, 2), (0, 1, 2, 3, 4, 5, 6, 7)),  # another slice than planned for
        (Mesh((2, 4), device="tpu-v5e:2x2:2slices"), attached(2, 2, slices=2), (0, 2, 1, 3, 4, 6, 5, 7)),
        (Mesh((2, 4), device="tpu-v5p"), attached(2, 2, 2), (0, 4, 2, 6, 1, 5, 3, 7)),
        (Mesh((2, 4), device="tpu-v4"), attached(2, 2, 1, cores=2), (0, 1, 4, 5, 2, 3, 6, 7)),
        (Mesh((2, 2), device="tpu-v4"), attached(2, 2, 1), (0, 2, 1, 3)),  # one device a chip: by coordinates
        (Mesh((2, 4)), [{"name": f"CPU:{i}"} for i in range(8)], tuple(range(8))),
        (Mesh((2, 4), device="h100"), attached(2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),  # a plan for something else
    ],
)
def test_devices_stand_where_they_were_priced(
    mesh: Mesh, attributes: list[dict[str, Any]], ids: tuple[int, ...]
) -> None:
    assert device_ids(mesh, attributes) == ids
    assert device_ids(mesh, attributes[::-1]) == ids


@given(st.data())
def test_a_tensor_of_many_dims_is_seen_in_few_of_which_the_same_are_split(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 9))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=rank, max_size=rank)))
    dims = data.draw(st.permutations(range(rank)))[:3]
    spec = tuple((f"axis{dim}",) if dim in dims else () for dim in range(rank))
    order, sizes, fewer = fewer_dims(shape, spec)
    assert sorted(order) == list(range(rank))
    assert len(sizes) == len(fewer) <= MOST_DIMS
    assert math.prod(sizes) == math.prod(shape)
    split = [(size, axes) for size, axes in zip(sizes, fewer, strict=True) if axes]
    assert split == [(shape[dim], spec[dim]) for dim in order if spec[dim]]
