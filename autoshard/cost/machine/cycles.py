"""Seconds of a TPU's kernels, by a model fitted to the estimates that libtpu writes into its programs (`cycles.toml`).

The matrix units work through a product in output tiles of 8 x 128, each with a pass per 128 (v6e: 256) contracted
elements, and through a convolution with passes of its own for each tap of the window; bf16 results are packed on the
way out, operands loaded. The vector unit works through all other arrays tile by tile. A kernel takes about the longer
of that and of its traffic to device memory.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.cost.machine.device import Device
from autoshard.cost.machine.tiles import LANES, ROWS

Array = npt.NDArray[np.float64]

TILE = 1024
"""Elements of a vector register: 8 sublanes of 128 lanes."""

CLASSES = ("tiles", "read", "written", "simple", "slow", "converted", "moved", "summed_lanes", "summed_rows")
"""What the vector unit's time is a sum of, all in registers: elements of a kernel's largest array, 4 kB read and
written, results of ops by their kind, operands of sums over the minor-most dim and over others."""

TIMED = frozenset({"dot_general", "convolution"})
"""Kinds of ops whose products the model is of."""

DTYPES = frozenset({"bf16", "f16", "f32"})
"""Operands of products that the model is of: they run at one rate; i8 and f64 at others."""

_SLOW = frozenset(
    """exponential exponential_minus_one log log_plus_one logistic tanh erf erf_inv power sqrt rsqrt cbrt atan2 tan sine
    cosine divide remainder""".split()  # noqa: SIM905
)
_MOVED = frozenset("transpose copy concatenate pad slice reverse reshape partition_slice".split())  # noqa: SIM905
_FREE = frozenset(
    """argument parameter constant bitcast broadcast broadcast_in_dim iota tuple get_tuple_element convolution dot
    dot_general fusion dynamic_slice dynamic_update_slice gather scatter sort reduce reduce_window custom_call
    bitcast_convert optimization_barrier""".split()  # noqa: SIM905
)


def class_of(kind: str) -> str | None:
    """The class of an op by its StableHLO kind; None for one that the vector unit spends no time on."""
    if kind in _FREE:
        return None
    if kind == "convert":
        return "converted"
    return "slow" if kind in _SLOW else "moved" if kind in _MOVED else "simple"


@dataclass(frozen=True)
class Products:
    """`batch` products [m, k] x [k, n], or a convolution that makes n features at m positions (`convolved`).

    Attributes:
        narrow: whether the result is in bf16.
        taps: of a convolution's window, with a product [m, k] x [k, n] each; 0 for other products, of which either
            operand may be the rows.
        convolution: whether it is one, or the gradient of one's kernel.
        tiles: of a result of fewer images than a tile has rows, which the vector unit takes apart.
        wide: how many of both operands are in f32.
    """

    batch: float
    m: float
    n: float
    k: float
    narrow: bool
    taps: float = 0.0
    convolution: bool = False
    tiles: float = 0.0
    wide: int = 0

    def sizes(self, away: float) -> tuple[float, ...]:
        """As `product_cycles` reads them; `away`: the part of what the kernel reads and writes in device memory."""
        of_vector = not self.convolution and self.taps == 0 and min(self.m, self.n) == 1
        narrow, vector = float(self.narrow), float(of_vector)
        return self.batch, self.m, self.n, self.k, self.taps, self.tiles, self.wide, narrow, away, vector

    @property
    def least_bytes(self) -> float:
        """Of the smallest of operands and result."""
        read, made = 2 + self.wide, 2 if self.narrow else 4
        return self.batch * min(read * self.m * self.k, read * self.k * self.n, made * self.m * self.n)


STREAMED = 0.95
"""From this part of a kernel's bytes on, operands and result of its product are all windows of device memory."""
ON_CHIP = 0.5
"""Where no program is known, a product streams if its smallest array takes more than this part of on-chip memory.

A judgement: libtpu copies an operand of 8,192 x 4,096 x 4,096 on chip; in whole programs smaller ones stream too.
"""


FEATURES, SAVED = 32, 0.55
"""Taps share passes if so many features are read, and if that saves more than this part of the passes left.

What it saves counts once for each width of a matrix unit that is made. These two and the next two were read off 85
drawn convolutions that libtpu 0.0.51 compiled for v5e, not fitted; v4, v5p and v6e take the same.
"""

WIDE, TOGETHER = 9, 3
"""If fewer features are read: the taps from which a window shares passes, and how many share one at most."""


def convolved(rhs: Sequence[int], made: Sequence[int], attrs: Mapping[str, Any], narrow: bool) -> Products:
    """A convolution by the shapes of its kernel and result, and its attributes in StableHLO.

    One whose window has more taps than its result has positions is the gradient of a kernel: a product per position.
    Holes of a base dilation take no passes along one dim, those along others do.
    """
    images, columns, *around = (made[dim] for dim in attrs["out"])
    _, read, *window = (rhs[dim] for dim in attrs["rhs"])
    taps, positions = math.prod(window), math.prod(around)
    if taps > positions or attrs["feature_groups"] > 1:
        return Products(positions, images, columns, taps * read, narrow, convolution=True)
    tiles = positions * -(-columns // LANES) if images < ROWS else 0
    spread = max(attrs["lhs_dilation"], default=1)
    return Products(1.0, images * positions, columns, read, narrow, taps / spread, True, tiles)


@dataclass(frozen=True)
class Done:
    """What one kernel does.

    Attributes:
        products: of its matrix units.
        vector: on a TPU class -> registers, of `CLASSES`.
    """

    products: tuple[Products, ...]
    vector: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Constants:
    """The model of one device kind; cycles unless said otherwise.

    Attributes:
        start, product_start, narrow_start: per kernel, without a product, with one, with one of a bf16 result.
        wait: further, of a product that moves anything from or to device memory.
        sharp: exponent of the norm that stands for "the longer of" passes and stores.
        window: bytes that a kernel moves before it computes anything; others move beside that.
        memory: share of the datasheet's bandwidth.
        rate: passes take so many times the datasheet's FLOP.
        lanes: side of a matrix unit.
        packed, packed_near: per register of a result in bf16, of a kernel that uses device memory, and of another.
        loaded, weights: per register of either operand.
        stored: per register of an f32 result, at least.
        streamed, wide: of a product that streams (`STREAMED`), beside its passes: per register of a bf16 result, which
            is packed, and of an f32 operand, which is converted each time that a window of it is read.
        vector: per register of each of `CLASSES`; `fused`: of slow ops in a kernel with a product, whose other ops
            take no time.
    """

    start: float
    product_start: float
    narrow_start: float
    wait: float
    sharp: float
    window: float
    memory: float
    rate: float
    lanes: int
    packed: float
    packed_near: float
    stored: float
    streamed: float
    wide: float
    loaded: float
    weights: float
    vector: tuple[float, ...]
    fused: float


@dataclass(frozen=True)
class Model:
    """The constants of a kind, the libtpu they are of, and errors on what they were not fitted to, in words."""

    constants: Constants
    version: str
    errors: Mapping[str, Mapping[str, float]]


def product_cycles(sizes: Array, constants: Constants, device: Device) -> Array:
    """Cycles of products, without their traffic, [products].

    Args:
        sizes: [10, products]: `Products.sizes` of each.
    """
    batch, m, n, k, taps, tiles, wide, narrow, away, vector = sizes
    lanes = constants.lanes
    rate = device.peak_flops("bf16") / device.clock / 2 / TILE
    times = np.where(taps > 0, taps, 1.0)
    apart, shared = times * _whole(k, lanes), _whole(times * k, lanes)
    saves = (apart - shared) * np.ceil(n / lanes) > SAVED * shared
    few = np.where(times > WIDE, np.maximum(shared, apart / TOGETHER), apart)
    depth = np.where(k < FEATURES, few, np.where(saves, shared, apart))
    out = np.where(narrow > 0, np.where(away > 0, constants.packed, constants.packed_near), constants.stored)
    streams = (away >= STREAMED) & (taps == 0)
    beside = constants.streamed * (narrow > 0) + constants.wide * wide * depth / TILE
    passes = constants.rate * depth / rate
    tile = np.maximum(_longer(passes, out, constants.sharp), np.where(streams, passes + beside, 0.0))

    def turned(rows: Array, columns: Array) -> Array:
        high, across = _whole(rows, 8), _whole(columns, lanes)
        return np.asarray(
            (high * across * tile + high * depth * constants.loaded + across * depth * constants.weights) / TILE
        )

    passed = np.where(taps > 0, turned(m, n), np.minimum(turned(m, n), turned(n, m)))
    passed = np.where(vector > 0, _of_a_vector(m * n * k, wide, constants), passed)
    return np.asarray(batch * (passed + tiles * constants.vector[CLASSES.index("tiles")]))


def _of_a_vector(elements: Array, wide: Array, constants: Constants) -> Array:
    """Cycles of a matrix-vector product, in the vector unit and in f32 (`AlgebraicSimplifier`: dot strength reduction).

    Each register of the matrix is multiplied and summed; of bf16, both operands and the product are converted first.
    """
    each = dict(zip(CLASSES, constants.vector, strict=True))
    bytes_of = np.where(wide > 0, 4, 2)
    summed = each["simple"] + each["summed_lanes"] + each["tiles"] + each["read"] * bytes_of / 4
    return np.asarray(elements / TILE * (summed + np.where(wide > 0, 0, 3 * each["converted"])))


def away_share(registers: Array, moved: Array) -> Array:
    """The part of what kernels read and write that is in device memory.

    Args:
        registers: [kernels, classes], of `CLASSES`.
        moved: bytes between a kernel and device memory.
    """
    of_all = 4 * TILE * (registers[:, CLASSES.index("read")] + registers[:, CLASSES.index("written")])
    return np.asarray(np.minimum(moved / np.maximum(of_all, 1.0), 1.0))


def kernel_cycles(
    products: Array, narrow: Array, registers: Array, moved: Array, constants: Constants, device: Device
) -> Array:
    """Cycles of kernels, arrays [kernels].

    Args:
        products: cycles of a kernel's products; 0 without one. `narrow`: whether any has a bf16 result.
        registers: [kernels, classes], of `CLASSES`.
        moved: bytes between a kernel and device memory.
    """
    has = products > 0
    alone = registers @ np.array(constants.vector)
    busy = np.where(has, products + registers[:, CLASSES.index("slow")] * constants.fused, alone)
    first = np.where(narrow > 0, constants.narrow_start, constants.product_start) + constants.wait * (moved > 0)
    first = np.where(has, first, constants.start)
    return np.asarray(first + _beside(busy, moved, constants, device))


def _beside(busy: Array, moved: Array, constants: Constants, device: Device) -> Array:
    """Cycles of `busy` units beside traffic, the first window of which comes before."""
    moving = moved / (device.memory_bandwidth * constants.memory) * device.clock
    return np.asarray(np.maximum(busy, moving) + np.minimum(busy, moving) / (1 + moved / constants.window))


def beside_traffic(seconds: Array, moved: Array, device: Device) -> Array:
    """Seconds of products beside `moved` bytes of traffic; of a kind without a model, the longer of both."""
    found = model_of(device)
    if found is None:
        return np.asarray(np.maximum(seconds, moved / device.reachable_bandwidth))
    return _beside(seconds * device.clock, moved, found.constants, device) / device.clock


def _away(done: Products, device: Device) -> float:
    """The part of a product's arrays in device memory, of a kernel that uses it."""
    return 1.0 if done.least_bytes > ON_CHIP * device.on_chip_bytes else 0.5


@lru_cache(maxsize=1 << 15)
def product_seconds(done: Products, device: Device) -> float:
    """Seconds of products or a convolution in the matrix units, of a kernel that uses device memory."""
    sizes = np.array([done.sizes(_away(done, device))]).T
    return float(product_cycles(sizes, _constants(device), device)[0]) / device.clock


def kernel_seconds(done: Done, moved: float, constants: Constants, device: Device) -> float:
    """Seconds of one kernel; `moved`: bytes between it and device memory."""
    registers = np.array([[done.vector.get(name, 0.0) for name in CLASSES]])
    known = away_share(registers, np.array([moved]))[0] if done.vector or not moved else None
    sizes = np.array([one.sizes(_away(one, device) if known is None else known) for one in done.products])
    products = product_cycles(sizes.T, constants, device).sum() if done.products else 0.0
    narrow = np.array([any(one.narrow for one in done.products)])
    found = kernel_cycles(np.array([products]), narrow, registers, np.array([moved]), constants, device)
    return float(found[0]) / device.clock


@lru_cache
def model(kind: str) -> Model | None:
    """What was fitted to libtpu's estimates for devices of `kind`; None for a kind that nothing was."""
    found = _document().get(kind)
    if found is None:
        return None
    given = {each.name: found[each.name] for each in fields(Constants)}
    given["vector"] = tuple(given["vector"][each] for each in CLASSES)
    return Model(Constants(**given), found["version"], found["errors"])


def model_of(device: Device) -> Model | None:
    """The model of a device's kind; None where a file of that kind has no clock."""
    return model(device.kind) if device.clock else None


def _constants(device: Device) -> Constants:
    found = model(device.kind)
    assert found is not None, f"{device.name} has no model of cycles"
    return found.constants


@lru_cache
def _document() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("cycles.toml").read_text())


def _whole(size: Array, unit: int) -> Array:
    return np.asarray(np.ceil(size / unit) * unit)


def _longer(one: Array, other: Array, sharp: float) -> Array:
    """About the larger of two times."""
    most = np.maximum(np.maximum(one, other), 1e-30)
    return np.asarray(most * (1 + (np.minimum(one, other) / most) ** sharp) ** (1 / sharp))
