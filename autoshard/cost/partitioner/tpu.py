"""Collectives that a TPU's compiler turns into others, since it moves whole tiles of 8 x 128.

From compiling single collectives (libtpu 0.0.51, v5e and v5p); `test_tpu.py` has the cases.

- An all-reduce and dynamic-slice become a reduce-scatter only if slices are whole tiles, after padding that adds at
  most half the array. Collective permutes move padded slices into place.
- Slices of a dim that is neither sublane nor lane must be contiguous, so the dim major-most: else an all-reduce. So it
  is for slices of the sublane dim that are no whole tiles, if it has dims around it.
- A reduce-scatter runs in equal pieces that fit a buffer: slices are padded to as many rows of tiles as that takes.
- An all-gather of a vector with shards that are no multiple of 128 elements becomes an all-reduce of zero-padded
  shards. So does one of up to 16 MiB over all of a slice of 64 or more devices, and any if that is a torus of three
  dims.
"""

from __future__ import annotations

import math

from autoshard.cost.machine import layout
from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.figures import figure, of_kind, table, whole
from autoshard.cost.machine.tiles import LANES, ROWS, minor_dims
from autoshard.cost.partitioner.collective_rules import CollectiveRules, Scattered, Shape
from autoshard.mesh import AxisGroup, Mesh

MOST_PADDING = figure("reduce_scatter_padding")
MOST_TILES = whole("reduce_scatter_tiles")
BUFFER = "reduce_scatter_buffer"
LATENCY_BOUND = whole("latency_bound")
MANY = 64


class TpuCollectiveRules(CollectiveRules):
    """Rules for (8, 128) tiles: collectives move whole tiles."""

    def lies_row_major(self, kind: str, shape: Shape) -> bool:
        """Results of gathers and of products with at least as many rows as batches are row-major.

        With fewer rows the batch may take the sublanes (33 compiled for v5e, 5 to 577 rows in batches of 8 to 64).
        """
        return kind == "gather" or (kind == "dot_general" and len(shape) > 2 and shape[-2] >= shape[0])

    def sums_whole(self, axes: AxisGroup, mesh: Mesh) -> bool:
        """See `layout.sums_whole`."""
        return layout.sums_whole(axes, mesh)

    def scattered(
        self,
        shape: Shape,
        dim: int,
        axes: AxisGroup,
        mesh: Mesh,
        *,
        row_major: bool = False,
        summed: bool = False,
        packed: int = 1,
    ) -> Scattered | None:
        """See the function `scattered`, with the device's buffer."""
        return scattered(
            shape,
            dim,
            mesh.group_size(axes),
            unit=scatter_unit(axes, mesh),
            row_major=row_major,
            summed=summed,
            buffer=of_kind(BUFFER, load_device(mesh.device).kind),
            packed=packed,
        )

    def hides(self, flops: int, size: int, axes: AxisGroup, mesh: Mesh) -> bool:
        """XLA's criterion (`disable_windowed_einsum` in dot_handler.cc).

        It compares the longer of contraction and permutes, plus two permutes, with contraction and collective in
        sequence. A collective over 2x2 chips uses the links of both torus dims, a windowed einsum those of one; XLA
        does not count that over 4x4. None was compiled over 64 devices and more (v5e, v5p, v6e), over 32 all were.
        """
        device = load_device(mesh.device)
        link = device.links[0]
        ways = mesh.ways(mesh.spanned(axes))
        if link.topology != "torus" or ways >= MANY:
            return False
        computing = flops / device.peak_flops("bf16")
        shares = table("einsum_link_share")
        permuting = size / (2 * shares.get(device.kind, shares["other"]) * link.bandwidth)
        moving = permuting / (2 if ways == 4 and scatter_unit(axes, mesh) == 4 else 1)
        return max(computing, permuting) + 2 * permuting / ways < computing + moving

    def gathers_as_sum(self, shape: Shape, part: int, size: int, axes: AxisGroup, mesh: Mesh) -> bool:
        """Vectors whose shards are no multiple of 128 elements, or small results over many chips."""
        if sum(extent > 1 for extent in shape) < 2 and part % LANES:
            return True
        torus = layout.whole_torus(axes, mesh)
        return math.prod(torus) >= MANY and (size <= LATENCY_BOUND or len(torus) > 2)


def scattered(
    shape: Shape,
    dim: int,
    ways: int,
    *,
    unit: int = 2,
    row_major: bool = False,
    summed: bool = False,
    buffer: int = of_kind(BUFFER, ""),
    packed: int = 1,
) -> Scattered | None:
    """The reduce-scatter of an array of `shape`, of which each of `ways` devices keeps a slice along `dim`.

    Args:
        unit: every slice is a multiple of so many tiles (`scatter_unit`), or of half as many rows of tiles.
        row_major: whether the producer's layout is row-major, as a gather's; slices of whole lanes keep it, else the
            array takes the layout of the slices.
        summed: whether reductions read the slices: then they are whole lanes in the producer's layout.
        buffer: tiles that hold all pieces (`BUFFER`).
        packed: elements per 32-bit word: slices along lanes are multiples of so many tiles (bf16: no reduce-scatter
            of 384 columns for each of four or eight devices, but of 256 and 768; v5e and v5p).

    Returns:
        None where it stays an all-reduce.
    """
    if sum(size > 1 for size in shape) < 2 or shape[dim] % ways:
        return None
    dim = sum(size > 1 for size in shape[:dim])
    shape = tuple(size for size in shape if size > 1)
    part = tuple(size // ways if at == dim else size for at, size in enumerate(shape))
    lane, row = len(shape) - 1, len(shape) - 2
    if not row_major or (dim == lane and part[lane] % LANES and not summed):
        lane, row = minor_dims(part)
    if shape[row] <= ROWS // 2:
        return None
    across, down = -(-part[lane] // LANES), -(-part[row] // ROWS)
    major = math.prod(size for at, size in enumerate(part) if at not in (lane, row))
    piece = buffer // (ways + 4)
    if dim == lane:
        cut = major > 1 or across > piece or _cuts(down, piece // across)
        return Scattered() if part[lane] % (LANES * packed) == 0 and cut else None
    if dim != row:
        if any(at not in (lane, row) for at in range(dim)):
            return None
        tiles = major * down * across
        found = _padded(tiles, _in_pieces(tiles, unit, piece), ways)
        if found is None:
            return None
        rows = down * ROWS / part[row]
        return Scattered(found.padded * rows, found.moved * rows)
    if _largest_prime(across) > MOST_TILES:
        return None
    if major > 1:
        short = down <= piece or part[row] % LANES == 0  # seen in 32 products over four devices
        return Scattered() if part[row] % (ROWS * packed) == 0 and short else None
    rows = max(unit // math.gcd(unit, across), unit // 2)
    fits = piece // across
    padded = _in_pieces(down, rows, fits) if fits >= rows else _up(down, rows)
    return _padded(part[row], padded * ROWS, ways)


def _in_pieces(size: int, unit: int, most: int) -> int:
    """`size` padded to equal pieces, multiples of `unit` and at most `most`; 0 where a single piece is larger."""
    pieces = -(-size // most)
    while (piece := _up(-(-size // pieces), unit)) > most:
        if pieces == 1:
            return 0
        pieces += 1
    return pieces * piece


def _cuts(size: int, most: int) -> bool:
    """Whether `size` divides into equal pieces of at most `most`, at most twice as many as needed."""
    least = -(-size // most)
    return any(size % pieces == 0 for pieces in range(least, 2 * least + 1))


def _padded(size: int, padded: int, ways: int) -> Scattered | None:
    padding = padded / size
    return Scattered(padding, (padding - 1) * (ways - 1) / ways) if 1 <= padding <= MOST_PADDING else None


def scatter_unit(axes: AxisGroup, mesh: Mesh) -> int:
    """Tiles of which a slice of a reduce-scatter over `axes` is a multiple: four over a square of chips, else two."""
    device = load_device(mesh.device)
    if device.links[0].topology != "torus":
        return 2
    over = [dim for dim in layout.layout(mesh, device) if any(axis in axes and size > 1 for axis, size in dim.parts)]
    return 4 if len(over) == 2 and over[0].size == over[1].size else 2


def _largest_prime(size: int) -> int:
    factor, largest = 2, 1
    while factor * factor <= size:
        if size % factor == 0:
            size //= factor
            largest = factor
        else:
            factor += 1
    return max(largest, size)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
