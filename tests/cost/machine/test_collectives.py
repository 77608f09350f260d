"""Collective times against the closed forms of the textbooks."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.machine.collectives import CollectiveKind, coefficients, seconds
from autoshard.cost.machine.device import Device, load_device
from autoshard.cost.machine.layout import links_used
from autoshard.mesh import AxisPart, Mesh

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
B = 1e9


def datasheet(kind: str) -> Device:
    """A device kind without what was measured on it."""
    return dataclasses.replace(load_device(kind), measured="")


def bandwidth_seconds(kind: CollectiveKind, axes: tuple[str, ...], mesh: Mesh) -> float:
    """Seconds for B bytes by datasheet, latencies left out."""
    return coefficients(kind, axes, mesh, datasheet(mesh.device))[1] * B


@pytest.mark.parametrize("n", [2, 4, 8])
def test_switch(n: int) -> None:
    mesh, port = Mesh((n,), ("x",), "h100"), load_device("h100").link("nvlink").bandwidth
    assert bandwidth_seconds("all-reduce", ("x",), mesh) == pytest.approx(2 * (n - 1) / n * B / port)
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert bandwidth_seconds(kind, ("x",), mesh) == pytest.approx((n - 1) / n * B / port)
    assert bandwidth_seconds("collective-permute", ("x",), mesh) == pytest.approx(B / port)


def test_a_torus_dim_that_wraps_is_a_ring_in_both_directions() -> None:
    mesh, link = Mesh((16, 16), ("x", "y"), "tpu-v5e"), load_device("tpu-v5e").link("ici").bandwidth
    assert bandwidth_seconds("all-gather", ("x",), mesh) == pytest.approx(15 / 16 * B / (2 * link))
    assert bandwidth_seconds("all-reduce", ("x",), mesh) == pytest.approx(2 * 15 / 16 * B / (2 * link))
    # Every byte travels a quarter of the ring on average: n/4 hops x B bytes over 2 links.
    assert bandwidth_seconds("all-to-all", ("x",), mesh) == pytest.approx(16 / 4 * B / (2 * link))


def test_a_torus_dim_that_does_not_wrap_is_a_line() -> None:
    mesh, link = Mesh((2, 4), ("x", "y"), "tpu-v5e"), load_device("tpu-v5e").link("ici").bandwidth
    assert bandwidth_seconds("all-gather", ("y",), mesh) == pytest.approx(3 / 4 * B / link)
    # Half of each half's bytes cross the middle link: 2 devices x 2/4 of B.
    assert bandwidth_seconds("all-to-all", ("y",), mesh) == pytest.approx(2 * 2 / 4 * B / link)
    assert bandwidth_seconds("all-to-all", ("x",), mesh) == pytest.approx(B / 2 / link)


def test_two_torus_dims_share_the_work() -> None:
    mesh, link = Mesh((16, 16), ("x", "y"), "tpu-v5e"), load_device("tpu-v5e").link("ici").bandwidth
    assert bandwidth_seconds("all-gather", ("x", "y"), mesh) == pytest.approx(255 / 256 * B / (4 * link))


def test_an_axis_alone_takes_all_torus_dims() -> None:
    one, two = Mesh((8,), ("x",), "tpu-v5e"), Mesh((2, 4), ("x", "y"), "tpu-v5e")
    for kind in KINDS:
        assert bandwidth_seconds(kind, ("x",), one) == bandwidth_seconds(kind, ("x", "y"), two)


def test_axes_that_share_a_torus_dim_share_its_links() -> None:
    mesh, link = Mesh((2, 2, 2), ("x", "y", "z"), "tpu-v5e"), load_device("tpu-v5e").link("ici").bandwidth
    # z has a dim of its own, x and y share the other one, y inside.
    assert bandwidth_seconds("all-gather", ("z",), mesh) == pytest.approx(B / 2 / link)
    assert bandwidth_seconds("all-gather", ("y",), mesh) == pytest.approx(B / 2 / link)
    assert bandwidth_seconds("all-gather", ("x",), mesh) == pytest.approx(B / link)  # two pairs over the middle link


def test_groups_that_go_round_a_ring_have_both_directions() -> None:
    mesh, link = Mesh((2, 8), ("x", "y"), "tpu-v5e:1x16"), load_device("tpu-v5e").link("ici").bandwidth
    # y goes round the ring in steps of two, two groups beside each other; x are neighbours.
    assert bandwidth_seconds("all-gather", ("y",), mesh) == pytest.approx(7 / 8 * B / (2 * link / 2))
    assert bandwidth_seconds("all-gather", ("x",), mesh) == pytest.approx(B / 2 / link)
    # Sixteen devices send half of what they have over eight hops, on 32 links: a group of two is no shorter way.
    links, ring, devices, stride = links_used({"x": 2, "y": 8}, (("x", 2), ("y", 8)), True, {"x"})
    assert (ring, devices, stride) == (True, 2, 8)
    assert 1 / 2 / links == pytest.approx(16 * 8 / 2 / 32)


def test_a_torus_of_cubes_wraps_only_where_it_is_whole() -> None:
    link = load_device("tpu-v5p").link("ici").bandwidth
    whole = Mesh((4, 4, 4), ("x", "y", "z"), "tpu-v5p:4x4x4")
    part = Mesh((2, 4, 4), ("x", "y", "z"), "tpu-v5p:2x4x4")
    assert bandwidth_seconds("all-gather", ("z",), whole) == pytest.approx(3 / 4 * B / (2 * link))
    assert bandwidth_seconds("all-gather", ("z",), part) == pytest.approx(3 / 4 * B / link)


def test_the_slowest_level_counts_across_hosts() -> None:
    mesh, h100 = Mesh((16,), ("x",), "h100"), load_device("h100")
    inside, across = h100.link("nvlink").bandwidth, h100.link("ib").bandwidth
    # Two hosts: the eight adapters of a host carry half of the bytes, less than NVLink's seven eighths take.
    expected = 2 * max(7 / 8 * B / inside, 1 / 2 * B / 8 / across)
    assert bandwidth_seconds("all-reduce", ("x",), mesh) == pytest.approx(expected)
    assert bandwidth_seconds("all-to-all", ("x",), mesh) == pytest.approx(max(7 / 8 * B / inside, B / 2 / across))
    # With one GPU of each host in a group, its own adapter is all there is.
    mesh = Mesh((2, 8), ("x", "y"), "h100")
    assert bandwidth_seconds("all-gather", ("x",), mesh) == pytest.approx(B / 2 / across)
    assert bandwidth_seconds("all-gather", ("y",), mesh) == pytest.approx(7 / 8 * B / inside)


def test_between_slices_each_level_takes_its_turn() -> None:
    mesh, v5e = Mesh((2, 16), ("x", "y"), "tpu-v5e:4x4:2slices"), load_device("tpu-v5e")
    link, dcn = v5e.link("ici").bandwidth, v5e.link("dcn").bandwidth
    inside, across = 15 / 16 * B / (2 * link), 1 / 2 * B / 16 / dcn
    assert bandwidth_seconds("all-reduce", ("x", "y"), mesh) == pytest.approx(2 * (inside + across))
    assert bandwidth_seconds("all-gather", ("x",), mesh) == pytest.approx(B / 2 / dcn)


def test_four_gpus_a_host() -> None:
    near, far = Mesh((2, 4), ("x", "y"), "h100"), Mesh((2, 4), ("x", "y"), "h100:2x4")
    placed = Mesh((2, 4), ("x", "y"), "h100", ("ib", "nvlink"))
    for kind in KINDS:
        assert bandwidth_seconds(kind, ("x",), far) == bandwidth_seconds(kind, ("x",), placed)
        assert bandwidth_seconds(kind, ("x",), far) > bandwidth_seconds(kind, ("x",), near)
        assert bandwidth_seconds(kind, ("y",), far) == bandwidth_seconds(kind, ("y",), near)
    both = Mesh((8,), ("x",), "h100:2x4")
    assert bandwidth_seconds("all-gather", ("x",), both) == bandwidth_seconds("all-gather", ("x", "y"), far)


def test_an_explicit_placement_moves_an_axis_onto_the_slow_link() -> None:
    near = Mesh((2, 4), ("x", "y"), "h100")
    far = Mesh((2, 4), ("x", "y"), "h100", ("ib", "nvlink"))
    assert bandwidth_seconds("all-gather", ("y",), near) == bandwidth_seconds("all-gather", ("y",), far)
    ratio = load_device("h100").link("nvlink").bandwidth / load_device("h100").link("ib").bandwidth
    assert bandwidth_seconds("all-gather", ("x",), far) == pytest.approx(
        bandwidth_seconds("all-gather", ("x",), near) * ratio
    )


def test_virtual_cpu_devices_share_one_memory() -> None:
    mesh = Mesh((2, 4), ("x", "y"), "cpu")
    assert bandwidth_seconds("all-gather", ("y",), mesh) == pytest.approx(8 * 3 / 4 * B / 10e9)


def test_a_part_of_an_axis_costs_as_many_devices_as_it_has() -> None:
    mesh = Mesh((2, 4), ("x", "y"), "h100")
    two = bandwidth_seconds("all-gather", ("x",), mesh)
    assert bandwidth_seconds("all-gather", (AxisPart(("y",), 2, 4),), mesh) == pytest.approx(two)
    hosts = Mesh((16,), ("x",), "h100")  # eight of sixteen are a host's
    assert bandwidth_seconds("all-gather", (AxisPart(("x",), 8, 16),), hosts) == bandwidth_seconds(
        "all-gather", ("x",), Mesh((8,), ("x",), "h100")
    )
    torus = Mesh((16,), ("x",), "tpu-v5e:1x16")  # half of a ring is a line
    line = Mesh((8,), ("x",), "tpu-v5e:1x8")
    assert bandwidth_seconds("all-gather", (AxisPart(("x",), 8, 16),), torus) == bandwidth_seconds(
        "all-gather", ("x",), line
    )


def test_latency_is_paid_once_per_collective() -> None:
    mesh, device = Mesh((8,), ("x",), "h100"), datasheet("h100")
    alpha, beta = coefficients("all-gather", ("x",), mesh, device)
    assert alpha == pytest.approx(device.collective_overhead + 3 * device.link("nvlink").latency)
    assert seconds("all-gather", ("x",), B, mesh, device) == pytest.approx(alpha + beta * B)
    assert seconds("all-gather", ("x",), B, mesh, device, together=4) == pytest.approx(alpha / 4 + beta * B)


def test_nothing_costs_nothing() -> None:
    mesh, device = Mesh((1, 8), ("x", "y"), "tpu-v5e"), load_device("tpu-v5e")
    assert seconds("all-reduce", ("x",), 1e9, mesh, device) == 0
    assert seconds("all-reduce", (), 1e9, mesh, device) == 0
    assert seconds("all-reduce", ("y",), 0, mesh, device) == 0
    with pytest.raises(KeyError):
        seconds("all-reduce", ("w",), 1e9, mesh, device)
    with pytest.raises(ValueError, match="no collective is called 'broadcast'"):
        seconds("broadcast", ("y",), 1e9, mesh, device)  # type: ignore[arg-type]


meshes = st.builds(
    lambda shape, kind: Mesh(tuple(shape), ("x", "y", "z")[: len(shape)], kind),
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3),
    st.sampled_from(["tpu-v4", "tpu-v5e", "tpu-v5p", "h100", "a100", "cpu"]),
)


@given(meshes, st.data(), st.sampled_from(KINDS), st.floats(1, 1e12), st.floats(1, 1e12))
def test_more_bytes_never_take_less_time(
    mesh: Mesh, data: st.DataObject, kind: CollectiveKind, a: float, b: float
) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.axis_names), unique=True)))
    device = load_device(mesh.device)
    low, high = (seconds(kind, axes, size, mesh, device) for size in sorted((a, b)))
    assert 0 <= low <= high


@given(meshes, st.data(), st.sampled_from(KINDS))
def test_the_order_in_which_axes_are_named_does_not_matter(
    mesh: Mesh, data: st.DataObject, kind: CollectiveKind
) -> None:
    axes = tuple(data.draw(st.permutations(mesh.axis_names)))
    device = load_device(mesh.device)
    assert seconds(kind, axes, B, mesh, device) == pytest.approx(seconds(kind, axes[::-1], B, mesh, device))


@given(meshes, st.sampled_from([(k, k2) for k in ("all-gather", "reduce-scatter") for k2 in ("all-reduce",)]))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    mesh: Mesh, kinds: tuple[CollectiveKind, CollectiveKind]
) -> None:
    half, whole = (coefficients(kind, mesh.axis_names, mesh, datasheet(mesh.device))[1] for kind in kinds)
    assert whole == pytest.approx(2 * half)


@given(meshes, st.sampled_from(["all-reduce", "all-gather"]))
def test_faster_links_are_never_slower(mesh: Mesh, kind: CollectiveKind) -> None:
    device = datasheet(mesh.device)
    links = tuple(dataclasses.replace(link, bandwidth=2 * link.bandwidth) for link in device.links)
    faster: Device = dataclasses.replace(device, links=links)
    slow = coefficients(kind, mesh.axis_names, mesh, device)[1]
    assert coefficients(kind, mesh.axis_names, mesh, faster)[1] == pytest.approx(slow / 2)
