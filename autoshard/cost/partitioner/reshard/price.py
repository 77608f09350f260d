"""The collectives and the cost of a reshard, and when intermediate shardings cost less.

GSPMD does not take the cheapest path: `(y,.) -> (.,x)` gathers the whole tensor where the hop `(y,x)` moves a fraction
of it. `steps.py` follows its algorithm on device arrays (`benchmarks/reshards.py` compares it with the compilers, see
docs/reshards.md). This module caches the result, names the mesh axes, prices it, and compares paths (`hops.py`).

Bytes scale with the tensor if every dim divides by the number of devices; other dims are part of the cache key. Dims
that neither sharding splits, and axes of one device, do not matter; idle axes do.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autoshard.cost.machine.collectives import Collective, coefficients, seconds
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.targets import Target
from autoshard.cost.partitioner.reshard.device_tiles import tiles_of
from autoshard.cost.partitioner.reshard.step_tables import CRASH, NEVER, Step, step_table
from autoshard.cost.partitioner.reshard.steps import CrashError, axis_group, reshard_tiles
from autoshard.cost.partitioner.targets import COLLECTIVE_RULES
from autoshard.mesh import MAX_AXES, AxisGroup, Mesh, Spec, orders

Array = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Places = tuple[tuple[int, ...], ...]
"""A spec with axes as positions in the mesh."""

Fit = tuple[int, ...] | None
"""Per dim its size where the devices do not divide it, else 0; None: they divide all."""


@dataclass(frozen=True)
class Steps:
    """The collectives of a reshard.

    Attributes:
        steps: in order.
        rematerialized: whether XLA gathers the whole value (*involuntary full rematerialization*).
    """

    steps: tuple[Step, ...]
    rematerialized: bool


def reshard(
    shape: Sequence[int], dtype_bytes: int, src: Spec, dst: Spec, mesh: Mesh, target: Target
) -> tuple[Collective, ...]:
    """The collectives that `target`'s partitioner emits where a value annotated `src` is annotated `dst`.

    `shape` is the whole tensor's; uneven dims count their padding.
    """
    total = math.prod(shape) * dtype_bytes
    steps = reshard_steps(src, dst, mesh, target, fit_of(shape, mesh)).steps
    return tuple(
        Collective(step.kind, step.axes, math.ceil(step.share * total)) for step in steps if step.kind != CRASH
    )


def reshard_matrix(
    shape: Sequence[int],
    dtype_bytes: int,
    srcs: Sequence[Spec],
    dsts: Sequence[Spec],
    mesh: Mesh,
    device: Device,
) -> tuple[Array, Array]:
    """(seconds, memory) of every direct reshard, both of shape (srcs, dsts).

    `memory` is bytes per device of the largest copy that it makes, the resharded value included; 0 where nothing
    changes.
    """
    total = float(math.prod(shape) * dtype_bytes)
    fit = fit_of(shape, mesh)
    alphas, betas, memories = _affine_matrix(tuple(srcs), tuple(dsts), mesh, device, fit, bytes_of(total, device))
    return alphas + betas * total, np.ceil(memories * total)


# --- seconds and memory as functions of the tensor's bytes --------------------------------------------------------


def bytes_of(total: float, device: Device) -> float | None:
    """`total`, where seconds depend on it in another way than by a line; None on devices that none were measured on."""
    return total if device.measured else None


@dataclass(frozen=True)
class Affine:
    """Seconds alpha + beta * (bytes of the global tensor), and memory per device as a fraction of those bytes."""

    alpha: float
    beta: float
    memory: float

    def seconds(self, total: float) -> float:
        """Seconds for a tensor of `total` bytes."""
        return self.alpha + self.beta * total


FREE = Affine(0.0, 0.0, 0.0)


@lru_cache(maxsize=1 << 16)
def affine(src: Spec, dst: Spec, mesh: Mesh, device: Device, fit: Fit = None, total: float | None = None) -> Affine:
    """The cost of a direct reshard on `device`; `fit` as in `reshard_steps`, `total` as of `bytes_of`."""
    if src == dst:
        return FREE
    copy = 1.0
    for i, dim in enumerate(dst):
        ways = mesh.ways(dim)
        size = fit[i] if fit is not None and fit[i] else ways
        copy *= -(-size // ways) / size
    steps = reshard_steps(src, dst, mesh, device.target, fit).steps
    alpha, beta = _cost(steps, mesh, device, total)
    return Affine(alpha, beta, max([copy, *(float(step.share) for step in steps)]))


@lru_cache(maxsize=4096)
def _affine_matrix(
    srcs: tuple[Spec, ...], dsts: tuple[Spec, ...], mesh: Mesh, device: Device, fit: Fit, total: float | None
) -> tuple[Array, Array, Array]:
    near = near_on(mesh, srcs, dsts)
    table = np.zeros((3, len(srcs), len(dsts)))
    for i, src in enumerate(srcs):
        for j, dst in enumerate(dsts):
            way = (src, dst) if near[i, j] else (src, _kept(src, dst), dst)
            legs = [affine(one, two, mesh, device, fit, total) for one, two in itertools.pairwise(way)]
            table[0, i, j] = sum(leg.alpha for leg in legs)
            table[1, i, j] = sum(leg.beta for leg in legs)
            table[2, i, j] = max(leg.memory for leg in legs)
    table.setflags(write=False)
    return table[0], table[1], table[2]


def affine_table(
    specs: Sequence[Spec], mesh: Mesh, device: Device, fit: Fit, total: float | None = None
) -> tuple[Array, Array]:
    """(alpha, beta) of the direct reshards between all of `specs`; on four axes infinite unless near (`near_on`)."""
    axes, places, sizes = _numbered(mesh)
    numbered = [_places(spec, places) for spec in specs]

    def steps(i: int, j: int) -> tuple[Step, ...]:
        return _steps(*_active(numbered[i], numbered[j], mesh.size, fit), sizes, axes, device.target).steps

    key = (numbered, mesh.size, fit, sizes, axes, device.target)
    table = step_table(key, len(specs), steps, near_on(mesh, specs, specs))
    costs = np.array([_cost(way, mesh, device, total) for way in table.ways])
    return costs[table.index, 0], costs[table.index, 1]


def specs_over(rank: int, axes: Sequence[str], dims: Iterable[int] | None = None) -> list[Spec]:
    """Every spec of a tensor of `rank` dims that splits only `dims` (default all), over some of `axes`.

    Several on one dim in the orders of `mesh.orders`.
    """
    allowed = list(range(rank)) if dims is None else list(dims)
    found: list[Spec] = []
    for places in itertools.product([-1, *allowed], repeat=len(axes)):
        per_dim = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in range(rank)]
        found += itertools.product(*(orders(axes_of, axes) for axes_of in per_dim))
    return found


# --- the steps of a pair -------------------------------------------------------------------------------------------


def fit_of(shape: Sequence[int], mesh: Mesh) -> Fit:
    """How the dims of a shape divide on `mesh`: None where every dim divides by the number of devices."""
    fit = tuple(size if size % mesh.size else 0 for size in shape)
    return fit if any(fit) else None


@lru_cache(maxsize=1 << 16)
def reshard_steps(src: Spec, dst: Spec, mesh: Mesh, target: Target, fit: Fit = None) -> Steps:
    """The collectives of a pair, for a tensor of any size whose dims divide as `fit` (of `fit_of`) says."""
    axes, places, sizes = _numbered(mesh)
    before, after, shape = _active(_places(src, places), _places(dst, places), mesh.size, fit)
    return Steps((), False) if before == after else _steps(before, after, shape, sizes, axes, target)


def _numbered(mesh: Mesh) -> tuple[tuple[str, ...], dict[str, int], Shape]:
    """Axes of more than one device: their names, numbers and sizes."""
    axes = mesh.split_axes
    return axes, {axis: i for i, axis in enumerate(axes)}, tuple(map(mesh.axis_size, axes))


def near_on(mesh: Mesh, srcs: Sequence[Spec], dsts: Sequence[Spec]) -> npt.NDArray[np.bool_]:
    """(srcs, dsts): whether a direct reshard is worked out; on up to three axes all are.

    On four: axes leave their dims, or enter dims, or all that move do so from one and the same dim to another. All
    others follow by hops, so that tables stay small.
    """
    if len(mesh.split_axes) < MAX_AXES:
        return np.ones((len(srcs), len(dsts)), dtype=np.bool_)

    def dims(specs: Sequence[Spec]) -> npt.NDArray[np.int64]:
        on = [{axis: dim for dim, split in enumerate(spec) for axis in split} for spec in specs]
        return np.array([[each.get(axis, -1) for axis in mesh.split_axes] for each in on])

    before, after = dims(srcs)[:, None], dims(dsts)[None]
    stays = before == after
    ends = np.where(stays, -1, (before + 1) * 64 + after + 1)
    one_kind = (stays | (ends == ends.max(axis=2, keepdims=True))).all(axis=2)
    return np.asarray(one_kind | (stays | (after < 0)).all(axis=2) | (stays | (before < 0)).all(axis=2))


def _kept(src: Spec, dst: Spec) -> Spec:
    """What a reshard that is not near is estimated to pass through: a gather and a slice of all that moves."""
    return tuple(tuple(axis for axis in before if axis in after) for before, after in zip(src, dst, strict=True))


def _places(spec: Spec, places: dict[str, int]) -> Places:
    return tuple(tuple(places[axis] for axis in dim if axis in places) for dim in spec)


def _active(src: Places, dst: Places, devices: int, fit: Fit) -> tuple[Places, Places, Shape]:
    """The dims that either side splits, and sizes for them that divide as `fit` says."""
    dims = [i for i, (before, after) in enumerate(zip(src, dst, strict=True)) if before or after]
    shape = tuple(fit[i] if fit is not None and fit[i] else devices for i in dims)
    return tuple(src[i] for i in dims), tuple(dst[i] for i in dims), shape


def _cost(steps: Iterable[Step], mesh: Mesh, device: Device, total: float | None) -> tuple[float, float]:
    """(alpha, beta) of collectives one after the other; all in alpha, where the tensor's bytes are given."""
    alpha, beta = 0.0, 0.0
    for step in steps:
        if step.kind == CRASH:
            return math.inf, 0.0
        share, kind = float(step.share), step.kind
        if kind == "all-gather" and gathers_all_as_sums(step.axes, mesh, device.target):
            kind = "all-reduce"
        if total is None:
            a, b = coefficients(kind, step.axes, mesh, device)
        else:
            a, b = seconds(kind, step.axes, share * total, mesh, device), 0.0
        alpha += a
        beta += b * share
    return alpha, beta


@lru_cache(maxsize=1024)
def gathers_all_as_sums(axes: AxisGroup, mesh: Mesh, target: Target) -> bool:
    """Whether a target's compiler makes a sum of zero-padded shards of a gather over `axes`, however large."""
    return COLLECTIVE_RULES[target].gathers_as_sum((2, 2), 2, sys.maxsize, axes, mesh)


@lru_cache(maxsize=1 << 16)
def _steps(src: Places, dst: Places, shape: Shape, sizes: Shape, names: tuple[str, ...], target: Target) -> Steps:
    try:
        done = reshard_tiles(shape, tiles_of(src, sizes), tiles_of(dst, sizes), target)
    except CrashError:
        return Steps((NEVER,), True)
    total = math.prod(shape)
    steps = tuple(
        Step(each.kind, axis_group(each, sizes, names), Fraction(each.elements, total)) for each in done.steps
    )
    return Steps(steps, done.rematerialized)
