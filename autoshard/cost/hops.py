"""Detours: shardings to annotate on the way from one sharding to another, where that is cheaper than going at once.

The candidates in between use only axes of the two ends, each where one of the ends has it or not at all, and split no
dim unevenly that the ends do not split so. Most pairs need none: a reshard that is one collective of no more than
either end's part of the value cannot be improved on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autoshard.cost.collectives import Collective
from autoshard.cost.device import Device
from autoshard.cost.reshard import Affine, Array, Fit, affine, fit_of, reshard, reshard_matrix, reshard_steps
from autoshard.mesh import Mesh, Spec

MAX_HOPS = 2
WORTH = 0.99
"""A detour is taken where it takes less than this part of the direct way's time."""


@dataclass(frozen=True)
class Path:
    """A way to reshard that lowering can write.

    Attributes:
        hops: the specs in between, to be annotated one after the other; empty when the direct reshard is best.
        collectives: what is emitted on the whole way.
        seconds: their time.
        memory: bytes per device of the largest copy that the way makes, the final one included.
    """

    hops: tuple[Spec, ...]
    collectives: tuple[Collective, ...]
    seconds: float
    memory: int


def reshard_path(shape: Sequence[int], dtype_bytes: int, src: Spec, dst: Spec, mesh: Mesh, device: Device) -> Path:
    """The fastest way from `src` to `dst` over at most `MAX_HOPS` specs in between; the direct one unless it is slower.

    On a tie the first way that was tried is kept, the one with fewer hops.
    """
    shape = tuple(shape)
    hops, seconds = hops_between(shape, dtype_bytes, src, dst, mesh, device)
    total = math.prod(shape) * dtype_bytes
    fit = fit_of(shape, mesh)
    legs = list(itertools.pairwise((src, *hops, dst)))
    collectives = tuple(each for a, b in legs for each in reshard(shape, dtype_bytes, a, b, mesh, device.target))
    memory = max(affine(a, b, mesh, device, fit).memory * total for a, b in legs)
    return Path(hops, collectives, seconds, math.ceil(memory))


def hops_between(
    shape: tuple[int, ...], dtype_bytes: int, src: Spec, dst: Spec, mesh: Mesh, device: Device
) -> tuple[tuple[Spec, ...], float]:
    """The hops of `reshard_path`, and its seconds."""
    fit = fit_of(shape, mesh)
    total = float(math.prod(shape) * dtype_bytes)
    direct = affine(src, dst, mesh, device, fit).seconds(total)
    best: tuple[Spec, ...] = ()
    least = direct * WORTH
    for hops, whole in detours(src, dst, mesh, device, fit):
        time = whole.seconds(total)
        if time < least:
            best, least = hops, time
    return best, least if best else direct


def path_matrix(
    shape: Sequence[int], dtype_bytes: int, srcs: Sequence[Spec], dsts: Sequence[Spec], mesh: Mesh, device: Device
) -> Array:
    """Seconds of the fastest way of every pair, of shape (srcs, dsts)."""
    shape = tuple(shape)
    times, _ = reshard_matrix(shape, dtype_bytes, srcs, dsts, mesh, device)
    fit = fit_of(shape, mesh)
    total = float(math.prod(shape) * dtype_bytes)
    for row, column, ways in _detour_matrix(tuple(srcs), tuple(dsts), mesh, device, fit):
        least = min(way.seconds(total) for way in ways)
        if least < WORTH * times[row, column]:
            times[row, column] = least
    return times


@lru_cache(maxsize=4096)
def _detour_matrix(
    srcs: tuple[Spec, ...], dsts: tuple[Spec, ...], mesh: Mesh, device: Device, fit: Fit
) -> tuple[tuple[int, int, tuple[Affine, ...]], ...]:
    found = []
    for row, src in enumerate(srcs):
        for column, dst in enumerate(dsts):
            ways = detours(src, dst, mesh, device, fit)
            if ways:
                found.append((row, column, tuple(whole for _, whole in ways)))
    return tuple(found)


Detours = tuple[tuple[tuple[Spec, ...], Affine], ...]


@lru_cache(maxsize=1 << 16)
def detours(src: Spec, dst: Spec, mesh: Mesh, device: Device, fit: Fit = None) -> Detours:
    """(hops, what the whole way takes) of the ways that are the fastest for some size of tensor, shortest first."""
    if src == dst or not _improvable(src, dst, mesh, device, fit):
        return ()
    direct = affine(src, dst, mesh, device, fit)
    between = [spec for spec in _between(src, dst, mesh, fit) if spec not in (src, dst)]
    first = {spec: affine(src, spec, mesh, device, fit) for spec in between}
    last = {spec: affine(spec, dst, mesh, device, fit) for spec in between}
    ways: list[tuple[tuple[Spec, ...], Affine]] = [((spec,), _then(first[spec], last[spec])) for spec in between]
    if MAX_HOPS > 1:
        lower = min((way.beta for _, way in ways), default=direct.beta)
        for a, b in itertools.permutations(between, 2):
            if first[a].beta + last[b].beta < min(lower, direct.beta):
                ways.append(((a, b), _then(_then(first[a], affine(a, b, mesh, device, fit)), last[b])))
    kept: list[tuple[tuple[Spec, ...], Affine]] = []
    for hops, way in sorted(ways, key=lambda each: (each[1].beta, each[1].alpha, len(each[0]))):
        better = [direct, *(other for _, other in kept)]
        if not any(other.alpha <= way.alpha and other.beta <= way.beta for other in better):
            kept.append((hops, way))
    return tuple(sorted(kept, key=lambda each: len(each[0])))


def _then(one: Affine, other: Affine) -> Affine:
    return Affine(one.alpha + other.alpha, one.beta + other.beta, max(one.memory, other.memory))


def _improvable(src: Spec, dst: Spec, mesh: Mesh, device: Device, fit: Fit) -> bool:
    """Whether the direct reshard does more than any has to: one collective of at most the larger of the two parts."""
    direct = reshard_steps(src, dst, mesh, device.target, fit)
    if not direct.steps:
        return False
    if direct.rematerialized or len(direct.steps) > 1:
        return True
    parts = min(math.prod(map(mesh.ways, spec)) for spec in (src, dst))
    return direct.steps[0].share * parts > 1


def _between(src: Spec, dst: Spec, mesh: Mesh, fit: Fit) -> Iterator[Spec]:
    """Every axis where `src` or `dst` has it, or nowhere; those of one dim in the order of `src`, or of `dst`."""
    home = [{axis: dim for dim, axes in enumerate(spec) for axis in axes} for spec in (src, dst)]
    axes = mesh.in_order({*home[0], *home[1]})
    seen = set()
    for places in itertools.product(*(dict.fromkeys([home[0].get(a), home[1].get(a), None]) for a in axes)):
        dims = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in range(len(src))]
        for spec in itertools.product(*(_orders(dim, src[i], dst[i]) for i, dim in enumerate(dims))):
            if spec not in seen and _even(spec, src, dst, mesh, fit):
                seen.add(spec)
                yield spec


def _orders(axes: Sequence[str], before: Sequence[str], after: Sequence[str]) -> list[tuple[str, ...]]:
    """`axes` as `before` has them with the others behind, and as `after` has them with the others behind."""
    found = []
    for one, other in ((before, after), (after, before)):
        order = [*(axis for axis in one if axis in axes), *(a for a in other if a in axes and a not in one)]
        found.append(tuple(order))
    return list(dict.fromkeys(found))


def _even(spec: Spec, src: Spec, dst: Spec, mesh: Mesh, fit: Fit) -> bool:
    """Whether `spec` splits no dim unevenly that neither end splits so."""
    return fit is None or all(
        size % mesh.ways(dim) == 0 or dim in (before, after)
        for size, dim, before, after in zip(fit, spec, src, dst, strict=True)
    )
