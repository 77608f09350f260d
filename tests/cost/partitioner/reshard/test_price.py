"""Resharding: what the partitioner emits, what that takes, and paths over specs in between."""

from __future__ import annotations

import itertools
import math
import operator
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.machine.collectives import seconds
from autoshard.cost.machine.device import Target, load_device
from autoshard.cost.overlap import hides
from autoshard.cost.partitioner.reshard.hops import hops_between, path_matrix, reshard_path
from autoshard.cost.partitioner.reshard.price import fit_of, near_on, reshard, reshard_matrix, reshard_steps, specs_over
from autoshard.mesh import AxisPart, Mesh, Spec, as_spec

TARGETS: tuple[Target, ...] = get_args(Target)
MESH = Mesh((2, 4), ("x", "y"))
SHAPE = (64, 128)
Shape = tuple[int, ...]
WHOLE = 64 * 128 * 4


def emitted(src: object, dst: object, target: Target = "cpu", mesh: Mesh = MESH) -> list[tuple[str, str, float]]:
    """(kind, axes, part of the whole tensor) of a reshard of an f32 tensor of SHAPE."""
    found = reshard(SHAPE, 4, as_spec(src), as_spec(dst), mesh, target)  # type: ignore[arg-type]
    return [(each.kind, "+".join(map(str, each.axes)), each.bytes / WHOLE) for each in found]


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_measured_before_the_table(target: Target) -> None:
    """The reshards that earlier probes of the three compilers singled out, on the same mesh."""
    assert emitted([None, None], ["x", "y"], target) == []
    assert emitted(["x", None], [None, None], target) == [("all-gather", "x", 1.0)]
    # A full rematerialisation, where two annotated steps move a half.
    assert emitted(["y", None], [None, "x"], target) == [("all-gather", "y", 1.0)]
    assert emitted(["y", None], ["y", "x"], target) == []
    assert emitted(["y", "x"], [None, "x"], target) == [("all-gather", "y", 0.5)]
    assert emitted(["x", None], [None, "y"], target) == [("all-gather", "x", 1.0)]
    # The order of two axes on one dim costs a permute.
    assert emitted(["x", None], [None, ("y", "x")], target) == [("all-to-all", "x", 1 / 8)]
    assert emitted(["x", None], [None, ("x", "y")], target) == [
        ("all-to-all", "x", 1 / 8),
        ("collective-permute", "x+y", 1 / 8),
    ]
    assert emitted([("x", "y"), None], [("y", "x"), None], target) == [("collective-permute", "x+y", 1 / 8)]
    assert emitted(["x", None], ["y", None], target) == [("collective-permute", "x+y", 1 / 4)]


def test_a_permute_and_two_gathers_are_one_gather_on_a_tpu() -> None:
    permute = ("collective-permute", "x+y", 1 / 8)
    two = [permute, ("all-gather", "y[2/4]", 1 / 4), ("all-gather", "y[2/4]", 1 / 2)]
    assert emitted(["x", "y"], [None, "x"], "cpu") == two
    assert emitted(["x", "y"], [None, "x"], "gpu") == two
    assert emitted(["x", "y"], [None, "x"], "tpu") == [permute, ("all-gather", "y", 1 / 2)]


def test_gathers_of_two_dims_are_merged_on_a_tpu() -> None:
    apart = [("all-gather", "y", 1 / 2), ("all-gather", "x", 1.0)]
    assert emitted(["x", "y"], [None, None], "cpu") == apart
    assert emitted(["x", "y"], [None, None], "gpu") == apart
    assert emitted(["x", "y"], [None, None], "tpu") == [("all-gather", "x+y", 1.0)]


def test_axes_that_stay_divide_the_bytes() -> None:
    mesh = Mesh((2, 4, 8), ("x", "y", "z"))
    moved = reshard((64, 64, 64), 4, as_spec(["z", "y", None]), as_spec(["z", None, "y"]), mesh, "gpu")
    assert [(each.kind, each.axes, each.bytes) for each in moved] == [("all-to-all", ("y",), 64**3 * 4 // 32)]


def test_axes_of_one_device_and_unsplit_dims_play_no_part() -> None:
    mesh = Mesh((1, 8), ("x", "y"))
    assert reshard(SHAPE, 4, as_spec(["x", None]), as_spec([None, None]), mesh, "cpu") == ()


def test_uneven_dims_count_their_padding() -> None:
    src, dst = as_spec([("x", "y"), None]), as_spec([None, None])
    (gather,) = reshard((50257, 3), 2, src, dst, MESH, "gpu")
    assert gather.bytes == 50264 * 3 * 2


def test_the_hop_over_both_axes_is_found() -> None:
    device = load_device("tpu-v5e")
    path = reshard_path((4096, 4096), 4, as_spec(["y", None]), as_spec([None, "x"]), MESH, device)
    assert path.hops == (as_spec(["y", "x"]),)
    assert [(each.kind, each.axes, each.bytes) for each in path.collectives] == [("all-gather", ("y",), 4096**2 * 2)]
    assert path.memory == 4096**2 * 2


def test_no_hop_splits_a_dim_unevenly() -> None:
    device = load_device("tpu-v5e")
    hops = 0
    for src, dst in itertools.permutations(specs_over(2, MESH.axis_names), 2):
        for hop in reshard_path((4096, 4094), 4, src, dst, MESH, device).hops:
            assert hop[1] in ((), ("x",))
            hops += 1
    assert hops > 2


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Mesh, Shape, Spec, Spec]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    mesh = Mesh(tuple(sizes), ("x", "y", "z")[: len(sizes)], "tpu-v5e")
    rank = draw(st.integers(1, 3))
    specs = specs_over(rank, mesh.axis_names)
    shape = tuple(draw(st.lists(st.integers(1, 4096), min_size=rank, max_size=rank)))
    return mesh, shape, draw(st.sampled_from(specs)), draw(st.sampled_from(specs))


@given(pairs(), st.sampled_from(TARGETS))
def test_bytes_are_sane(pair: tuple[Mesh, tuple[int, ...], Spec, Spec], target: Target) -> None:
    mesh, shape, src, dst = pair
    ways = [math.prod(map(mesh.axis_size, mesh.axis_names))] * len(shape)
    whole = math.prod(-(-size // n) * n for size, n in zip(shape, ways, strict=True)) * 4
    assert reshard(shape, 4, src, src, mesh, target) == ()
    found = reshard(shape, 4, src, dst, mesh, target)
    for each in found:
        assert 0 < each.bytes <= whole
        assert mesh.spanned(each.axes) == tuple(name for axis in each.axes for name in getattr(axis, "axes", (axis,)))
    if fit_of(shape, mesh) is None:  # splitting further is free; nothing else is, apart from axes of one device
        kept = [tuple(tuple(a for a in dim if mesh.axis_size(a) > 1) for dim in spec) for spec in (src, dst)]
        finer = all(after[: len(before)] == before for before, after in zip(*kept, strict=True))
        assert (found == ()) == finer


@given(pairs())
def test_the_matrix_agrees_with_single_reshards_and_no_path_is_slower(
    pair: tuple[Mesh, tuple[int, ...], Spec, Spec],
) -> None:
    mesh, shape, src, dst = pair
    device = load_device(mesh.device)
    times, memory = reshard_matrix(shape, 4, [src, dst], [dst, src], mesh, device)
    direct = sum(seconds(c.kind, c.axes, c.bytes, mesh, device) for c in reshard(shape, 4, src, dst, mesh, "tpu"))
    assert times[0, 0] == pytest.approx(direct, rel=1e-4, abs=1e-9)
    assert times[0, 1] == times[1, 0] == memory[0, 1] == memory[1, 0] == 0
    path = reshard_path(shape, 4, src, dst, mesh, device)
    assert path.seconds <= times[0, 0] * (1 + 1e-9)
    taken = sum(seconds(c.kind, c.axes, c.bytes, mesh, device) for c in path.collectives)
    assert path.seconds == pytest.approx(taken, rel=1e-4, abs=1e-9)
    if src != dst:
        assert memory[0, 0] >= math.prod(mesh.shard_shape(shape, dst)) * 4


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_more_bytes_never_take_less_time(a: int, b: int) -> None:
    specs = specs_over(2, MESH.axis_names)
    device = load_device("h100")
    low, high = (reshard_matrix((8 * n, 8), 4, specs, specs, MESH, device) for n in sorted((a, b)))
    assert (low[0] <= high[0]).all()
    assert (low[1] <= high[1]).all()
    assert (np.diag(low[0]) == 0).all()


@pytest.mark.parametrize("target", TARGETS)
def test_an_uneven_dim_that_two_axes_would_cut_is_gathered(target: Target) -> None:
    src, dst = as_spec(["y", None]), as_spec([None, ("x", "y")])
    assert [each.kind for each in reshard((1536, 1536), 4, src, dst, MESH, target)] == ["all-to-all"]
    assert [each.kind for each in reshard((1537, 1536), 4, src, dst, MESH, target)] == ["all-to-all"]
    (gather,) = reshard((1536, 1537), 4, src, dst, MESH, target)
    assert (gather.kind, gather.axes) == ("all-gather", ("y",))
    device = load_device({"cpu": "cpu", "tpu": "tpu-v5e", "gpu": "h100"}[target])
    for shape in ((1536, 1536), (1536, 1537)):
        times, _ = reshard_matrix(shape, 4, [src], [dst], MESH, device)
        listed = reshard(shape, 4, src, dst, MESH, target)
        assert times[0, 0] == pytest.approx(sum(seconds(c.kind, c.axes, c.bytes, MESH, device) for c in listed))


@pytest.mark.parametrize("target", TARGETS)
def test_an_idle_third_axis_can_be_in_the_way(target: Target) -> None:
    """Measured on 2x2x2: with a third axis idle, an exchange over the two minor ones is a full rematerialisation."""
    two, three = Mesh((2, 2), ("y", "z")), Mesh((2, 2, 2), ("x", "y", "z"))
    src, dst = as_spec(["z", None]), as_spec([None, ("y", "z")])
    assert "all-to-all" in [each.kind for each in reshard((64, 64), 4, src, dst, two, target)]
    (gather,) = reshard((64, 64), 4, src, dst, three, target)
    assert (gather.kind, gather.axes, gather.bytes) == ("all-gather", ("z",), 64 * 64 * 4)


def test_groups_that_follow_no_grid_are_named_and_priced() -> None:
    """2x3: (x,y) on one dim, to y on it and x on the other: groups of two across the boundary of an axis."""
    mesh = Mesh((2, 3), ("x", "y"))
    exchange, permute = reshard((1536, 1536), 4, as_spec([("x", "y"), None]), as_spec(["y", "x"]), mesh, "cpu")
    assert (exchange.kind, exchange.axes, exchange.bytes) == (
        "all-to-all",
        (AxisPart(("x", "y"), 2),),
        1536 * 1536 * 4 // 6,
    )
    assert (permute.kind, permute.axes) == ("collective-permute", ("x", "y"))
    assert seconds(exchange.kind, exchange.axes, exchange.bytes, mesh, load_device("h100")) > 0


def test_halos_pass_where_an_uneven_split_gets_finer() -> None:
    """Measured on CPU: 723 over 4 devices is 181 each, over 8 it is 91: three entries move up to the last."""
    shape = (721, 720, 723)
    (halo,) = reshard(shape, 4, as_spec([None, None, "y"]), as_spec([None, None, ("y", "x")]), MESH, "cpu")
    assert (halo.kind, halo.axes, halo.bytes) == ("collective-permute", ("y",), 3 * 721 * 720 * 4)


@given(pairs(), st.sampled_from(["cpu", "tpu-v5e", "h100"]))
def test_the_matrix_of_paths_is_that_of_single_paths(pair: tuple[Mesh, Shape, Spec, Spec], kind: str) -> None:
    mesh, shape, src, dst = pair
    device = load_device(kind)
    mesh = Mesh(mesh.shape, mesh.axis_names, kind)
    times = path_matrix(shape, 4, [src, dst], [dst, src], mesh, device)
    for (i, a), (j, b) in itertools.product(enumerate((src, dst)), enumerate((dst, src))):
        path = reshard_path(shape, 4, a, b, mesh, device)
        assert times[i, j] == pytest.approx(path.seconds, rel=1e-9)
        assert not {a, b} & set(path.hops)


@pytest.mark.parametrize("kind", ["cpu", "h100"])
def test_no_rematerialization_is_left_where_there_is_a_way_around(kind: str) -> None:
    """Of large tensors over two axes; a TPU's torus gathers over both axes as fast as one hop and a gather."""
    device, mesh = load_device(kind), Mesh((2, 4), ("x", "y"), kind)
    specs = specs_over(3, mesh.axis_names)
    direct, detoured = 0, 0
    for src, dst in itertools.permutations(specs, 2):
        path = reshard_path((512, 512, 512), 4, src, dst, mesh, device)
        direct += reshard_steps(src, dst, mesh, device.target).rematerialized
        legs = itertools.pairwise((src, *path.hops, dst))
        detoured += any(reshard_steps(a, b, mesh, device.target).rematerialized for a, b in legs)
    assert direct > 50
    assert detoured == 0


@pytest.mark.parametrize("shape", [(64, 64, 64), (8, 4, 32), (2, 4, 16)])
def test_on_four_axes_few_direct_reshards_lead_everywhere(shape: Shape) -> None:
    """Each hop is near, and a path's price is that of its legs."""
    device, mesh = load_device("h100"), Mesh((2, 4, 2, 4), device="h100")
    even = [spec for spec in specs_over(3, mesh.axis_names) if not any(map(operator.mod, shape, map(mesh.ways, spec)))]
    times = path_matrix(shape, 4, even, even, mesh, device)
    assert np.isfinite(times).all()
    near = near_on(mesh, even, even)
    assert near.mean() < 0.3 or len(even) < 50
    draw = np.random.default_rng(0)
    for i, j in zip(*(draw.integers(len(even), size=40) for _ in range(2)), strict=True):
        path = reshard_path(shape, 4, even[i], even[j], mesh, device)
        assert times[i, j] == pytest.approx(path.seconds)
        assert near_on(mesh, [even[i], *path.hops], [*path.hops, even[j]]).diagonal().all()


def test_on_four_axes_a_direct_reshard_of_many_moves_is_estimated_as_a_gather_and_a_slice():
    device, mesh = load_device("h100"), Mesh((2, 4, 2, 4), device="h100")
    src, dst = (("data",), ("model",), ("z",)), (("model",), ("z",), ("data",))
    direct, _ = reshard_matrix((64, 64, 64), 4, [src, ((), (), ())], [dst, ((), (), ())], mesh, device)
    assert direct[0, 0] == pytest.approx(direct[0, 1] + direct[1, 0])


CRASHING = [
    ((("z",), (), (), ("model",)), (("model",), ("z",), ("data",), ())),
    ((("z",), (), ("data",), ()), (("data",), ("z",), (), ("model",))),
]
"""Reshards of 16 x 16 x 16 x 16 on 2 x 2 x 4 devices on which XLA's CPU compiler dies of SIGFPE (jaxlib 0.10.2)."""


@pytest.mark.parametrize(("source", "target"), CRASHING)
def test_a_reshard_on_which_xla_crashes_takes_for_ever_and_a_way_around_it_is_found(source, target):
    mesh, device = Mesh((2, 2, 4), ("data", "model", "z"), "h100"), load_device("h100")
    seconds, _ = reshard_matrix((16,) * 4, 4, [source], [target, source], mesh, device)
    assert seconds[0, 0] == math.inf
    assert seconds[0, 1] == 0
    around = path_matrix((16,) * 4, 4, [source], [target], mesh, device)
    assert 0 < around[0, 0] < 1e-3
    hops = hops_between((16,) * 4, 4, source, target, mesh, device)
    assert hops
    for one, two in zip((source, *hops), (*hops, target), strict=True):
        assert math.isfinite(reshard_matrix((16,) * 4, 4, [one], [two], mesh, device)[0][0, 0])


def test_a_gather_over_a_whole_torus_of_three_dims_is_priced_as_the_sum_that_it_becomes() -> None:
    mesh = Mesh((16, 4), ("x", "y"), device="tpu-v5p:4x4x4")
    device, shape = load_device(mesh.device), (8192, 8192)
    total, whole = 2 * math.prod(shape), as_spec([None, None])
    both, one = as_spec([("x", "y"), None]), as_spec(["x", None])
    found, _ = reshard_matrix(shape, 2, [both, one], [whole], mesh, device)
    axes = ("x", "y")
    assert found[:, 0] == pytest.approx(
        [seconds("all-reduce", axes, total, mesh, device), seconds("all-gather", axes[:1], total, mesh, device)]
    )
    assert not hides(both, whole, mesh, device)
    assert hides(one, whole, mesh, device)
    assert not hides(one, as_spec([None, "x"]), mesh, device)  # an all-to-all
    flat = Mesh((16, 4), ("x", "y"), device="tpu-v5e:8x8")
    assert hides(both, whole, flat, load_device(flat.device))
