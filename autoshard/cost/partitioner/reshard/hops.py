"""Hops: intermediate shardings to annotate between two others where that is faster than the direct reshard.

Min-plus products of one matrix, the seconds of every direct reshard of a tensor of one size, compare all paths of up to
two hops. Only shardings that split all dims evenly take part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.machine.device import Device
from autoshard.cost.partitioner.reshard.price import (
    Array,
    Fit,
    affine,
    affine_table,
    bytes_of,
    fit_of,
    reshard,
    reshard_matrix,
    specs_over,
)
from autoshard.mesh import Mesh, Spec

MAX_TIME_RATIO = 0.99
"""A hop is taken where the path with it takes less than this fraction of the time without."""


@dataclass(frozen=True)
class Path:
    """A path of reshards that lowering can annotate.

    Attributes:
        hops: the intermediate specs, to annotate one after the other; empty when the direct reshard is best.
        collectives: what the whole path emits.
        seconds: their time.
        memory: bytes per device of the largest copy on the path, the final one included.
    """

    hops: tuple[Spec, ...]
    collectives: tuple[Collective, ...]
    seconds: float
    memory: int


def reshard_path(shape: Sequence[int], dtype_bytes: int, src: Spec, dst: Spec, mesh: Mesh, device: Device) -> Path:
    """The fastest path from `src` to `dst` with at most two hops; the direct reshard unless it is slower."""
    shape = tuple(shape)
    hops = hops_between(shape, dtype_bytes, src, dst, mesh, device)
    total = math.prod(shape) * dtype_bytes
    fit = fit_of(shape, mesh)
    legs = list(itertools.pairwise((src, *hops, dst)))
    collectives = tuple(each for a, b in legs for each in reshard(shape, dtype_bytes, a, b, mesh, device.target))
    taken = [affine(a, b, mesh, device, fit, bytes_of(total, device)) for a, b in legs]
    seconds = sum(each.seconds(total) for each in taken)
    return Path(hops, collectives, seconds, math.ceil(max(each.memory for each in taken) * total))


def hops_between(
    shape: tuple[int, ...], dtype_bytes: int, src: Spec, dst: Spec, mesh: Mesh, device: Device
) -> tuple[Spec, ...]:
    """The hops of `reshard_path`."""
    ways = _ways(mesh, device, fit_of(shape, mesh), len(shape), float(math.prod(shape) * dtype_bytes))
    specs, index = ways.specs, ways.index
    if src == dst or src not in index or dst not in index:
        return ()
    i, j = index[src], index[dst]
    if ways.two[i, j] < MAX_TIME_RATIO * min(ways.one[i, j], ways.direct[i, j]):
        first = int(np.argmin(ways.direct[i] + ways.one[:, j]))
        return specs[first], specs[int(np.argmin(ways.direct[first] + ways.direct[:, j]))]
    if ways.one[i, j] < MAX_TIME_RATIO * ways.direct[i, j]:
        return (specs[int(np.argmin(ways.direct[i] + ways.direct[:, j]))],)
    return ()


def path_matrix(
    shape: Sequence[int], dtype_bytes: int, srcs: Sequence[Spec], dsts: Sequence[Spec], mesh: Mesh, device: Device
) -> Array:
    """Seconds of the fastest path of every pair, of shape (srcs, dsts)."""
    shape = tuple(shape)
    total = float(math.prod(shape) * dtype_bytes)
    fit = fit_of(shape, mesh)
    ways = _ways(mesh, device, fit, len(shape), total)
    rows, columns = ([ways.index.get(spec, -1) for spec in side] for side in (srcs, dsts))
    times = ways.fastest[np.ix_(rows, columns)]
    for place in (i for i, row in enumerate(rows) if row < 0):
        times[place] = reshard_matrix(shape, dtype_bytes, [srcs[place]], dsts, mesh, device)[0][0]
    for place in (j for j, column in enumerate(columns) if column < 0):
        times[:, place] = reshard_matrix(shape, dtype_bytes, srcs, [dsts[place]], mesh, device)[0][:, 0]
    return times


@dataclass(frozen=True, eq=False)
class _Ways:
    """Seconds between all specs of a tensor.

    Attributes:
        specs, index: all of them, and their positions.
        direct: without hops.
        one, two: with the best one or two hops.
        fastest: with the hops that are worth it.
    """

    specs: list[Spec] = field(repr=False)
    index: dict[Spec, int] = field(repr=False)
    direct: Array = field(repr=False)
    one: Array = field(repr=False)
    two: Array = field(repr=False)
    fastest: Array = field(repr=False)


@lru_cache(maxsize=64)
def _ways(mesh: Mesh, device: Device, fit: Fit, rank: int, total: float) -> _Ways:
    specs, index, alphas, betas = _table(mesh, device, fit, rank, bytes_of(total, device))
    direct = alphas + betas * total
    one = _shortest(direct, direct)
    two = _shortest(direct, one)
    fastest = np.where(one < MAX_TIME_RATIO * direct, one, direct)
    fastest = np.where(two < MAX_TIME_RATIO * np.minimum(one, direct), two, fastest)
    return _Ways(specs, index, direct, one, two, fastest)


def _shortest(first: Array, second: Array) -> Array:
    """The min-plus product."""
    return np.stack([(row[:, None] + second).min(axis=0) for row in first])


@lru_cache(maxsize=64)
def _table(
    mesh: Mesh, device: Device, fit: Fit, rank: int, total: float | None
) -> tuple[list[Spec], dict[Spec, int], Array, Array]:
    """Specs that split every dim evenly, their positions, alphas and betas of all pairs."""
    sizes = [size or mesh.size for size in fit or (0,) * rank]
    specs = [
        spec
        for spec in specs_over(rank, mesh.split_axes, [dim for dim, size in enumerate(sizes) if size > 1])
        if not any(size % mesh.ways(dim) for size, dim in zip(sizes, spec, strict=True))
    ]
    alphas, betas = affine_table(specs, mesh, device, fit, total)
    return specs, {spec: i for i, spec in enumerate(specs)}, alphas, betas
