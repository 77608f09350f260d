"""Where mesh axes lie on the machine, and which device stands where."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.machine.device import DeviceError, load_device
from autoshard.cost.machine.layout import device_order, layout, machine, standard_shape, sums_whole
from autoshard.mesh import Mesh


def lying(shape: tuple[int, ...], kind: str, placement: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Per physical dim its link and its parts, outermost first, dims of one device left out."""
    mesh = Mesh(shape, ("x", "y", "z")[: len(shape)], kind, placement)
    found = []
    for dim in layout(mesh, load_device(kind)):
        parts = [f"{axis}{size}" for axis, size in dim.parts if size > 1]
        if parts:
            found.append((dim.link.name, " ".join(parts)))
    return found


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((2, 4), "tpu-v5e", [("ici", "x2"), ("ici", "y4")]),
        ((4, 2), "tpu-v5e", [("ici", "y2"), ("ici", "x4")]),  # the slice is a 2x4: the axes turn
        ((4, 2), "tpu-v5e:4x2", [("ici", "x4"), ("ici", "y2")]),
        ((8,), "tpu-v5e", [("ici", "x2"), ("ici", "x4")]),
        ((2, 8), "tpu-v5e", [("ici", "x2 y2"), ("ici", "y4")]),  # there is no 2x8 slice of 16 chips
        ((2, 2, 2), "tpu-v5e", [("ici", "z2"), ("ici", "x2 y2")]),  # the innermost has a dim of its own
        ((2, 8), "tpu-v5e:1x16", [("ici", "y8 x2")]),  # x are neighbours, y goes round
        ((16, 16), "tpu-v5e", [("ici", "x16"), ("ici", "y16")]),
        ((2, 16), "tpu-v5e:4x4:2slices", [("dcn", "x2"), ("ici", "y4"), ("ici", "y4")]),
        ((4, 8), "tpu-v5e:4x4:2slices", [("dcn", "x2"), ("ici", "x2 y2"), ("ici", "y4")]),
        ((2, 4), "tpu-v5p", [("ici", "x2"), ("ici", "y2"), ("ici", "y2")]),
        ((4, 4, 4), "tpu-v5p", [("ici", "x4"), ("ici", "y4"), ("ici", "z4")]),
        ((2, 4), "tpu-v4", [("ici", "x2"), ("ici", "y2"), ("ici", "y2")]),
        ((2, 4), "h100", [("nvlink", "x2 y4")]),
        ((2, 4), "h100:2x4", [("ib", "x2"), ("nvlink", "y4")]),
        ((8,), "h100:2x4", [("ib", "x2"), ("nvlink", "x4")]),
        ((2, 8), "h100", [("ib", "x2"), ("nvlink", "y8")]),
        ((4, 4), "h100", [("ib", "x2"), ("nvlink", "x2 y4")]),
        ((2, 4), "cpu", [("memory", "x2 y4")]),
    ],
)
def test_where_axes_lie(shape: tuple[int, ...], kind: str, expected: list[tuple[str, str]]) -> None:
    assert lying(shape, kind) == expected


def test_an_inner_axis_may_be_sent_across_hosts() -> None:
    assert lying((4, 2), "h100", ("nvlink", "ib")) == [("ib", "y2"), ("nvlink", "x4")]
    mesh = Mesh((4, 2), ("x", "y"), "h100:2x4", ("nvlink", "ib"))
    assert device_order(mesh, load_device("h100:2x4")) == (0, 4, 1, 5, 2, 6, 3, 7)


def test_devices_stay_in_order_where_that_is_a_grid() -> None:
    for shape, kind in [
        ((2, 4), "tpu-v5e"),
        ((8,), "tpu-v5e"),
        ((2, 8), "tpu-v5e"),
        ((2, 4), "tpu-v4"),
        ((4, 4), "h100"),
    ]:
        mesh = Mesh(shape, device=kind)
        assert device_order(mesh, load_device(kind)) == tuple(range(mesh.size)), (shape, kind)


def test_an_axis_that_turns_moves_its_devices() -> None:
    assert device_order(Mesh((4, 2), device="tpu-v5e:2x4"), load_device("tpu-v5e:2x4")) == (0, 4, 1, 5, 2, 6, 3, 7)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        (Mesh((2, 4), device="tpu-v5e"), "tpu-v5e:2x4"),
        (Mesh((2, 8), device="tpu-v5e"), "tpu-v5e:4x4"),
        (Mesh((2, 16), device="tpu-v5e", placement=("dcn", "ici")), "tpu-v5e:4x4:2slices"),
        (Mesh((512,), device="tpu-v6e"), "tpu-v6e:16x16:2slices"),
        (Mesh((2, 4), device="tpu-v5p"), "tpu-v5p:2x2x2"),
        (Mesh((2, 2), device="tpu-v5p"), "tpu-v5p:2x2x1"),
        (Mesh((2, 4), device="tpu-v4"), "tpu-v4:2x2x1"),
        (Mesh((2, 8), device="h100"), "h100:2x8"),
        (Mesh((2, 4), device="h100", placement=("ib", "nvlink")), "h100:2x4"),
        (Mesh((2, 4), device="a100"), "a100-80gb:8"),
        (Mesh((2, 4), device="h100:2x4"), "h100:2x4"),
        (Mesh((2, 4)), "cpu"),
    ],
)
def test_the_machine_of_a_mesh(mesh: Mesh, name: str) -> None:
    assert machine(mesh, load_device(mesh.device)) == name


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (Mesh((2, 4), device="h100:2x8"), "mesh 2x4 has 8 devices, h100:2x8 has 16"),
        (Mesh((2, 2), device="tpu-v4:2x2x1"), "tpu-v4:2x2x1 has 8 (XLA counts 2 per chip)"),
        (Mesh((4, 4), device="h100", placement=("nvlink", "nvlink")), "nvlink joins 8 devices"),
        (
            Mesh((2, 16), device="tpu-v5e:4x4:2slices", placement=("ici", "dcn")),
            "data of 2 on ici, model of 16 on dcn): that puts 2 devices on ici, which joins 16 there",
        ),
        (Mesh((3, 4), device="h100:2x6"), "that puts 4 devices on nvlink, which joins 6 there"),
        (Mesh((2, 4), device="h100", placement=("ici", "nvlink")), "device h100 has no link 'ici'; it has nvlink, ib"),
    ],
)
def test_a_mesh_that_does_not_lie_on_its_machine_says_why(mesh: Mesh, says: str) -> None:
    with pytest.raises(DeviceError) as error:
        layout(mesh, load_device(mesh.device))
    assert says in str(error.value)


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3),
    st.sampled_from(["tpu-v4", "tpu-v5e", "tpu-v5p", "h100", "cpu"]),
)
def test_every_device_stands_somewhere_once(shape: list[int], kind: str) -> None:
    mesh = Mesh(tuple(shape), ("x", "y", "z")[: len(shape)], kind)
    device = load_device(kind)
    dims = layout(mesh, device)
    assert math.prod(dim.size for dim in dims) == mesh.size
    for axis in mesh.axis_names:
        assert math.prod(size for dim in dims for name, size in dim.parts if name == axis) == mesh.axis_size(axis)
    assert sorted(device_order(mesh, device)) == list(range(mesh.size))


def test_standard_slices() -> None:
    assert [standard_shape(n, 2) for n in (1, 4, 8, 16, 32, 128, 256)] == [
        (1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 16), (16, 16)
    ]  # fmt: skip
    assert [standard_shape(n, 3) for n in (4, 8, 16, 64)] == [(2, 2, 1), (2, 2, 2), (2, 2, 4), (4, 4, 4)]
    assert standard_shape(8, 3, chip_devices=2) == (2, 2, 1, 2)


@pytest.mark.parametrize(
    ("shape", "kind", "axes", "whole"),
    [
        ((2, 4), "tpu-v5e", "xy", False),
        ((4, 4), "tpu-v5e", "xy", True),
        ((4, 4), "tpu-v5e", "y", False),
        ((2, 8), "tpu-v5e", "xy", True),  # on 4x4
        ((4, 8), "tpu-v5e", "xy", False),
        ((8, 8), "tpu-v5e", "xy", True),
        ((16,), "tpu-v6e", "x", True),
        ((2, 2), "tpu-v5p", "xy", False),
        ((8,), "tpu-v5p:2x4", "x", False),
        ((2, 4), "tpu-v5p", "xy", True),
        ((2, 2, 2), "tpu-v5p", "xz", False),
        ((2, 2, 4), "tpu-v5p", "xyz", True),
        ((4, 4), "tpu-v5p:4x4x1", "xy", True),
        ((4,), "tpu-v4:2x1x1", "x", False),
        ((2, 4), "tpu-v4", "xy", True),
        ((2, 4), "tpu-v5e:2x2:2slices", "xy", True),
        ((2, 4), "tpu-v5e:2x2:2slices", "x", False),
        ((2, 4), "tpu-v5e:2x2:2slices", "y", False),
        ((2, 16), "tpu-v5e:4x4:2slices", "y", True),
        ((2, 4, 4), "tpu-v5e:4x4:2slices", "yz", True),
        ((2, 4, 4), "tpu-v5e:4x4:2slices", "y", False),
        ((2, 8), "tpu-v5e:2x4:2slices", "y", False),
        ((2, 8), "tpu-v5p:2x2x2:2slices", "y", True),
        ((4, 4), "h100", "xy", False),
    ],
)
def test_a_sum_over_a_whole_torus_is_not_scattered(shape: tuple[int, ...], kind: str, axes: str, whole: bool) -> None:
    assert sums_whole(tuple(axes), Mesh(shape, ("x", "y", "z")[: len(shape)], kind)) == whole
