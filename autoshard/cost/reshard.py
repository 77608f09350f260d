"""What the partitioner emits to change a value's sharding, and what that takes.

GSPMD does not take the shortest path: `(y,.) -> (.,x)` gathers the whole tensor where a hop over `(y,x)` moves a
fraction of it. So this module does not reason about what could be done; it looks up what compilers were measured to do.
`reshard_table.json` holds, per target, every pair of specs over one and two axes of a tensor of up to three dims (four,
where two axes leave two dims for two others), written by `benchmarks/reshard_table.py`. Measured, and relied upon:

- bytes scale with the tensor, and of two axes' sizes only which divides which matters, so one mesh per relation (2x8,
  8x2, 2x2) stands for all;
- dims that neither spec splits, and axes that neither spec uses, play no part;
- axes that stay where they are, major to those that move, divide the bytes and play no other part.

On a mesh of three axes the last two do not always hold: an idle third axis can be in the way. For 2x2x2 the table names
the pairs of up to two dims that differ (CPU and GPU; a TPU's follow by merging gathers).

A pair over three axes that does not reduce to two, or over axes of which neither size divides the other, falls back to
`modelled`, GSPMD's order of attempts as far as it is understood.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

import numpy as np
import numpy.typing as npt

from autoshard.cost.collectives import Collective, CollectiveKind, coefficients
from autoshard.cost.device import Device, Target
from autoshard.mesh import Mesh, Spec

Array = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Places = tuple[tuple[int, ...], ...]
"""A spec with axes as positions: of the mesh, or of the axes that play a part."""


Fit = tuple[int, ...] | None
"""Per dim the greatest number of ways, dividing the number of devices, that splits it evenly; None: all of them."""


@dataclass(frozen=True)
class Step:
    """One collective of a reshard, for a tensor of any size.

    Attributes:
        kind: XLA's name.
        axes: as in `Collective.axes`; a collective over a part of an axis names it `model[2/4]`, as verification does.
        share: its bytes per device as a part of the whole tensor's (see `Collective.bytes`).
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    share: float


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


def reshard(
    shape: Sequence[int], dtype_bytes: int, src: Spec, dst: Spec, mesh: Mesh, target: Target
) -> tuple[Collective, ...]:
    """The collectives that `target`'s partitioner emits where a value annotated `src` is annotated `dst`.

    `shape` is the whole tensor's; uneven dims count their padding.
    """
    total = padded_elements(shape, src, dst, mesh) * dtype_bytes
    steps = reshard_steps(src, dst, mesh, target, fit_of(shape, mesh))
    return tuple(Collective(step.kind, step.axes, math.ceil(step.share * total)) for step in steps)


def reshard_path(shape: Sequence[int], dtype_bytes: int, src: Spec, dst: Spec, mesh: Mesh, device: Device) -> Path:
    """The fastest way from `src` to `dst` over at most one spec in between; the direct one where none is faster.

    A spec in between splits only dims that it divides evenly, and uses only axes of `src` and `dst`.
    """
    shape = tuple(shape)
    used = {axis for dim in (*src, *dst) for axis in dim}
    axes = tuple(axis for axis in mesh.axis_names if axis in used)
    fit = fit_of(shape, mesh)
    direct = affine(src, dst, mesh, device, fit)
    best: tuple[Spec, ...] = ()
    elements = float(math.prod(shape) * dtype_bytes)
    least = direct.seconds(padded_elements(shape, src, dst, mesh) * dtype_bytes)
    if direct.alpha > 0:
        for hop, first, second in _hops(src, dst, axes, mesh, device, fit):
            if any(size % mesh.ways(dim) for size, dim in zip(shape, hop, strict=True)):
                continue
            if first.seconds(elements) + second.seconds(elements) >= least:
                continue
            time = first.seconds(padded_elements(shape, src, hop, mesh) * dtype_bytes)
            time += second.seconds(padded_elements(shape, hop, dst, mesh) * dtype_bytes)
            if time < least:
                best, least = (hop,), time
    stops = (src, *best, dst)
    legs = list(itertools.pairwise(stops))
    collectives = tuple(each for a, b in legs for each in reshard(shape, dtype_bytes, a, b, mesh, device.target))
    memory = max(
        affine(a, b, mesh, device, fit).memory * padded_elements(shape, a, b, mesh) * dtype_bytes for a, b in legs
    )
    return Path(best, collectives, least, math.ceil(memory))


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
    shape = tuple(shape)
    alphas, betas, memories = _affine_matrix(tuple(srcs), tuple(dsts), mesh, device, fit_of(shape, mesh))
    total = float(math.prod(shape) * dtype_bytes)
    bytes: float | Array = total
    if any(size % mesh.size for size in shape):
        bytes = np.array([[padded_elements(shape, a, b, mesh) * dtype_bytes for b in dsts] for a in srcs], dtype=float)
        bytes = bytes.reshape(len(srcs), len(dsts))
    return alphas + betas * bytes, np.ceil(memories * bytes)


# --- seconds and memory as functions of the tensor's bytes --------------------------------------------------------


@dataclass(frozen=True)
class Affine:
    """alpha + beta x (the whole tensor's padded bytes) seconds, and memory as a part of those bytes."""

    alpha: float
    beta: float
    memory: float

    def seconds(self, total: float) -> float:
        """Seconds for a tensor of `total` bytes."""
        return self.alpha + self.beta * total


@lru_cache(maxsize=1 << 16)
def affine(src: Spec, dst: Spec, mesh: Mesh, device: Device, fit: Fit = None) -> Affine:
    """What a direct reshard takes on `device`; `fit` as in `reshard_steps`."""
    if src == dst:
        return Affine(0.0, 0.0, 0.0)
    alpha, beta = 0.0, 0.0
    copy = 1 / math.prod(mesh.ways(dim) for dim in dst)
    for step in reshard_steps(src, dst, mesh, device.target, fit):
        a, b = coefficients(step.kind, step.axes, mesh, device)
        alpha += a
        beta += b * step.share
        copy = max(copy, step.share)
    return Affine(alpha, beta, copy)


@lru_cache(maxsize=4096)
def _affine_matrix(
    srcs: tuple[Spec, ...], dsts: tuple[Spec, ...], mesh: Mesh, device: Device, fit: Fit
) -> tuple[Array, Array, Array]:
    table = np.zeros((3, len(srcs), len(dsts)))
    for i, src in enumerate(srcs):
        for j, dst in enumerate(dsts):
            entry = affine(src, dst, mesh, device, fit)
            table[:, i, j] = entry.alpha, entry.beta, entry.memory
    table.setflags(write=False)
    return table[0], table[1], table[2]


@lru_cache(maxsize=1 << 14)
def _hops(
    src: Spec, dst: Spec, axes: tuple[str, ...], mesh: Mesh, device: Device, fit: Fit
) -> tuple[tuple[Spec, Affine, Affine], ...]:
    """Specs between `src` and `dst` that are faster than the direct way for some size of tensor."""
    direct = affine(src, dst, mesh, device, fit)
    found = []
    for hop in specs_over(len(src), axes, dims=[i for i in range(len(src)) if src[i] or dst[i]]):
        if hop in (src, dst):
            continue
        first, second = affine(src, hop, mesh, device, fit), affine(hop, dst, mesh, device, fit)
        if first.alpha + second.alpha < direct.alpha or first.beta + second.beta < direct.beta:
            found.append((hop, first, second))
    return tuple(found)


def specs_over(rank: int, axes: Sequence[str], dims: Iterable[int] | None = None) -> list[Spec]:
    """Every spec of a tensor of `rank` dims that splits only `dims` (default all), over some of `axes`, every order."""
    allowed = list(range(rank)) if dims is None else list(dims)
    found: list[Spec] = []
    for places in itertools.product([-1, *allowed], repeat=len(axes)):
        per_dim = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in range(rank)]
        found += itertools.product(*(list(itertools.permutations(axes_of)) for axes_of in per_dim))
    return found


def padded_elements(shape: Sequence[int], src: Spec, dst: Spec, mesh: Mesh) -> int:
    """Elements of the tensor with every dim padded to what `src` and `dst` need."""
    count = 1
    for size, before, after in zip(shape, src, dst, strict=True):
        ways = max(mesh.ways(before), mesh.ways(after))
        count *= -(-size // ways) * ways
    return count


# --- the steps of a pair -------------------------------------------------------------------------------------------


def fit_of(shape: Sequence[int], mesh: Mesh) -> Fit:
    """What matters of a shape to how it splits on `mesh`: None where every dim divides by the number of devices."""
    fit = tuple(math.gcd(size, mesh.size) for size in shape)
    return None if all(ways == mesh.size for ways in fit) else fit


@lru_cache(maxsize=1 << 16)
def reshard_steps(src: Spec, dst: Spec, mesh: Mesh, target: Target, fit: Fit = None) -> tuple[Step, ...]:
    """The collectives of a pair, for a tensor of any size whose dims divide as `fit` (of `fit_of`) says."""
    steps = _exception(src, dst, mesh, target)
    if steps is None:
        steps = regular_steps(src, dst, mesh, target)
    if fit is not None and any(step.kind == "all-to-all" for step in steps) and _too_uneven(src, dst, mesh, fit):
        steps = regular_steps(src, ((),) * len(src), mesh, target)
    return steps


def _too_uneven(src: Spec, dst: Spec, mesh: Mesh, fit: tuple[int, ...]) -> bool:
    """Whether an exchange between dims becomes a full rematerialisation (measured: 24 of 24 such pairs on 2x4).

    It does where a dim would have to be cut along more than one axis, and is uneven; swapping two dims' splits is
    still an all-to-all of padded parts.
    """
    if sorted(map(mesh.ways, src)) == sorted(map(mesh.ways, dst)):
        return False
    for ways, before, after in zip(fit, src, dst, strict=True):
        uneven = ways % mesh.ways(before) or ways % mesh.ways(after)
        if before != after and uneven and max(_cuts(before, mesh), _cuts(after, mesh)) > 1:
            return True
    return False


def _cuts(axes: Iterable[str], mesh: Mesh) -> int:
    return sum(mesh.axis_size(axis) > 1 for axis in axes)


def regular_steps(src: Spec, dst: Spec, mesh: Mesh, target: Target) -> tuple[Step, ...]:
    """The collectives of a pair as they follow from its reduced pair."""
    small = reduced(src, dst, mesh)
    if not small.axes:
        return ()
    sizes = tuple(mesh.axis_size(axis) for axis in small.axes)
    steps = looked_up(small.src, small.dst, sizes, target)
    if steps is None:
        steps = modelled(small.src, small.dst, sizes, target)
    return tuple(
        Step(kind, tuple(small.axes[place] + part for place, part in axes), share / small.kept)
        for kind, axes, share in steps
    )


def _exception(src: Spec, dst: Spec, mesh: Mesh, target: Target) -> tuple[Step, ...] | None:
    """On three axes of one size: the row of a pair that does not follow from its reduced pair."""
    axes = tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)
    if len(axes) != 3 or len({mesh.axis_size(axis) for axis in axes}) != 1:
        return None
    row = measured(target).get(f"2x2x2 {encode(*whole_pair(src, dst, axes))}")
    if row is None:
        return None
    steps = decode(row, [mesh.axis_size(axis) for axis in axes])
    return tuple(Step(kind, tuple(axes[i] + part for i, part in named), share) for kind, named, share in steps)


def whole_pair(src: Spec, dst: Spec, axes: Sequence[str]) -> tuple[Places, Places]:
    """The pair as positions in `axes`, other axes left out, and without the dims that neither spec splits."""
    place = {axis: i for i, axis in enumerate(axes)}
    pairs = [
        (tuple(place[axis] for axis in a if axis in place), tuple(place[axis] for axis in b if axis in place))
        for a, b in zip(src, dst, strict=True)
    ]
    kept = [pair for pair in pairs if pair[0] or pair[1]]
    return tuple(a for a, _ in kept), tuple(b for _, b in kept)


SymbolicStep = tuple[CollectiveKind, tuple[tuple[int, str], ...], float]
"""Kind; (axis, part of it such as `[2/4]`, or nothing) in mesh order; share of the tensor."""


@dataclass(frozen=True)
class Reduced:
    """A pair without what plays no part.

    Attributes:
        src, dst: per dim that matters, positions in `axes`.
        axes: mesh axes that matter, in mesh order.
        kept: into how many parts the axes that stay where they are divide the tensor.
    """

    src: Places
    dst: Places
    axes: tuple[str, ...]
    kept: int


def reduced(src: Spec, dst: Spec, mesh: Mesh) -> Reduced:
    """Drop axes of size one, axes that stay in place and major, dims and axes that neither spec uses."""
    kept = 1
    pairs: list[tuple[list[str], list[str]]] = []
    for before_dim, after_dim in zip(src, dst, strict=True):
        before = [axis for axis in before_dim if mesh.axis_size(axis) > 1]
        after = [axis for axis in after_dim if mesh.axis_size(axis) > 1]
        while before and after and before[0] == after[0]:
            kept *= mesh.axis_size(before.pop(0))
            after.pop(0)
        if before or after:
            pairs.append((before, after))
    axes = mesh.in_order(axis for pair in pairs for side in pair for axis in side)
    place = {axis: i for i, axis in enumerate(axes)}
    return Reduced(
        tuple(tuple(place[axis] for axis in before) for before, _ in pairs),
        tuple(tuple(place[axis] for axis in after) for _, after in pairs),
        axes,
        kept,
    )


def relation(sizes: Sequence[int]) -> str | None:
    """The mesh that was measured to stand for axes of these sizes; None if none was."""
    if len(sizes) == 1:
        return "8"
    if len(sizes) == 2:
        a, b = sizes
        if a == b:
            return "2x2"
        if b % a == 0:
            return "2x8"
        if a % b == 0:
            return "8x2"
    return None


def looked_up(src: Places, dst: Places, sizes: tuple[int, ...], target: Target) -> tuple[SymbolicStep, ...] | None:
    """The measured row of a reduced pair; None if there is none."""
    mesh = relation(sizes)
    row = measured(target).get(f"{mesh} {encode(src, dst)}") if mesh else None
    return None if row is None else decode(row, sizes)


@cache
def measured(target: Target) -> dict[str, str]:
    """`<mesh> <pair>` -> row, of one target."""
    text = resources.files("autoshard.cost").joinpath("reshard_table.json").read_text(encoding="utf-8")
    table = json.loads(text)
    rows: dict[str, str] = {}
    for name in ("common", target):
        for mesh, pairs in table["rows"].get(name, {}).items():
            rows.update({f"{mesh} {pair}": row for pair, row in pairs.items()})
    if target == "tpu":
        others = {f"2x2x2 {pair}": row for pair, row in table["rows"].get("gpu", {}).get("2x2x2", {}).items()}
        rows = {key: _gathers_merged(row) for key, row in others.items()} | rows
    return rows


def _gathers_merged(row: str) -> str:
    """A row as a TPU runs it: gathers in a row are one (so in all 40 such rows over two axes)."""
    steps: list[list[str]] = []
    for kind, axes, divisor in _STEP.findall(row):
        if steps and kind == steps[-1][0] == "all-gather":
            joint = sorted({*re.findall(r"\d", re.sub(r"\[.*?\]", "", steps[-1][1] + axes))})
            steps[-1][1:] = ["".join(joint), divisor]
        else:
            steps.append([kind, axes, divisor])
    return ", ".join(f"{kind} {axes}/{divisor}" for kind, axes, divisor in steps)


def encode(src: Places, dst: Places) -> str:
    """`0,1>.,01`: per dim its axes by position, `.` for none."""

    def one(places: Places) -> str:
        return ",".join("".join(map(str, dim)) or "." for dim in places)

    return f"{one(src)}>{one(dst)}"


_STEP = re.compile(r"([a-z-]+) ((?:\d(?:\[[\d:]+\])?)+)/([\d:]*)")


def decode(row: str, sizes: Sequence[int]) -> tuple[SymbolicStep, ...]:
    """A table row for axes of `sizes`.

    `all-gather 1[1:0]/01`: an all-gather over a part of axis 1 that holds (size of axis 1) / (size of axis 0) devices;
    its bytes are the tensor's divided by the sizes of axes 0 and 1.
    """

    def number(text: str) -> float:
        over, _, under = text.partition(":")
        return math.prod(sizes[int(i)] for i in over) / math.prod(sizes[int(i)] for i in under)

    steps: list[SymbolicStep] = []
    for kind, axes, divisor in _STEP.findall(row):
        named = []
        for axis, part in re.findall(r"(\d)(?:\[([\d:]+)\])?", axes):
            size = sizes[int(axis)]
            devices = math.ceil(number(part)) if part else size
            named.append((int(axis), "" if devices >= size else f"[{devices}/{size}]"))
        steps.append((kind, tuple(named), 1 / number(divisor)))
    return tuple(steps)


# --- the model, where nothing was measured ------------------------------------------------------------------------


def modelled(src: Places, dst: Places, sizes: tuple[int, ...], target: Target) -> tuple[SymbolicStep, ...]:
    """GSPMD's order of attempts (`PartitionedHlo::Reshard`), on a reduced pair."""

    def ways(places: Iterable[Iterable[int]]) -> float:
        return math.prod(sizes[axis] for dim in places for axis in dim)

    def over(kind: CollectiveKind, axes: Iterable[int], share: float) -> SymbolicStep:
        return kind, tuple((axis, "") for axis in sorted(set(axes))), share

    def gathers(before: Places, after: Places) -> list[SymbolicStep]:
        """All-gather what `after` no longer splits, last dim first; a TPU merges the gathers of all dims."""
        steps = []
        now = list(before)
        for dim in reversed(range(len(before))):
            lost = before[dim][len(after[dim]) :]
            now[dim] = after[dim]
            if lost:
                steps.append(over("all-gather", lost, 1 / ways(now)))
        if target == "tpu" and len(steps) > 1:
            steps = [over("all-gather", [axis for _, axes, _ in steps for axis, _ in axes], steps[-1][2])]
        return steps

    before, after = [ways([dim]) for dim in src], [ways([dim]) for dim in dst]
    have, want = ({axis for dim in places for axis in dim} for places in (src, dst))
    if all(b[: len(a)] == a for a, b in zip(src, dst, strict=True)):
        return ()
    if all(a[: len(b)] == b for a, b in zip(src, dst, strict=True)):
        return tuple(gathers(src, dst))
    if all(b % a == 0 for a, b in zip(before, after, strict=True)):
        sliced = tuple(a + tuple(axis for axis in b if axis not in a) for a, b in zip(src, dst, strict=True))
        return (over("collective-permute", _displaced(sliced, dst, sizes), 1 / ways(dst)),)
    if all(a % b == 0 for a, b in zip(before, after, strict=True)) and want <= have:
        # Bring the axes that stay to the front, then gather the others.
        front = tuple(b + tuple(axis for axis in a if axis not in b) for a, b in zip(src, dst, strict=True))
        return (over("collective-permute", _displaced(src, front, sizes), 1 / ways(src)), *gathers(front, dst))
    if have <= want:
        # Slice by the new axes for free, exchange between dims, put the devices in order. What one dim would have to
        # give to several is gathered instead.
        home = {axis: dim for dim, axes in enumerate(dst) for axis in axes}
        given = [sorted({home[axis] for axis in axes} - {dim}) for dim, axes in enumerate(src)]
        if any(len(takers) > 1 for takers in given):
            return tuple(gathers(src, ((),) * len(src)))
        crossing = [[axis for axis in a if axis not in b] for a, b in zip(src, dst, strict=True)]
        landed = _landed(src, dst, {axis for axes in crossing for axis in axes})
        steps = [over("all-to-all", axes, 1 / ways(dst)) for axes in crossing if axes]
        if landed != dst:
            steps.append(over("collective-permute", _displaced(landed, dst, sizes), 1 / ways(dst)))
        return tuple(steps)
    gone = [dim for dim, axes in enumerate(src) if axes and not set(axes) & want]
    if gone and len(gone) < sum(map(bool, src)):
        rest = tuple(() if dim in gone else axes for dim, axes in enumerate(src))
        return (*gathers(src, rest), *modelled(rest, dst, sizes, target))
    return tuple(gathers(src, ((),) * len(src)))


def _landed(src: Places, dst: Places, crossing: set[int]) -> Places:
    """Where an all-to-all of `crossing` axes brings `src`, sliced by new axes before: they arrive as minor axes."""
    have = {axis for dim in src for axis in dim}
    order = [axis for dim in src for axis in dim]
    return tuple(
        tuple(axis for axis in a if axis not in crossing)
        + tuple(axis for axis in b if axis not in have)
        + tuple(sorted((axis for axis in b if axis in crossing and axis not in a), key=order.index))
        for a, b in zip(src, dst, strict=True)
    )


def _displaced(src: Places, dst: Places, sizes: Sequence[int]) -> set[int]:
    """Axes along which devices have to exchange their parts: those that do not stay at their place in a dim."""

    def places(spec: Places) -> dict[int, tuple[int, int]]:
        found = {}
        for dim, axes in enumerate(spec):
            stride = 1
            for axis in reversed(axes):
                found[axis] = (dim, stride)
                stride *= sizes[axis]
        return found

    before, after = places(src), places(dst)
    return {axis for axis in (*before, *after) if before.get(axis) != after.get(axis)}
