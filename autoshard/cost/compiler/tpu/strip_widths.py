"""Space-to-batch on TPU: which activations of few images are split into strips, and how wide the strips are.

XLA's `SpaceToBatchConverter` (xla/service/space_to_batch_converter.cc) splits the last spatial dim into 8 strips. The
first convolution of a chain pads that dim so that 8 strips hold it with the padding of its window: 64 positions become
8 strips of 9. Later ops keep the width, or change it to what a convolution needs. Batch-to-space ends the chain before
padded pooling, a reshape, a concatenation of strips of two widths, a user of the whole activation, and a convolution
that is a windowed einsum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.cost.compiler.lowered import COLLECTIVES, Array, Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.tpu.conv_loops import ring
from autoshard.cost.compiler.tpu.layout import row_major
from autoshard.graph.groups import BARRIER, ELEMENTWISE
from autoshard.graph.ops import Value

SPLITS = 8
"""Strips per image."""
FEW = 8
"""Images per device from which on there is no space-to-batch: the sublanes of a tile."""


@dataclass(frozen=True)
class Window:
    """A convolution's window along the last spatial dim, with `size` input and `made` output positions."""

    size: int
    made: int
    taps: int
    stride: int
    low: int
    high: int
    spread: int
    """Base dilation."""

    @property
    def padded(self) -> int:
        """Positions with padding."""
        return self.size + (self.low if self.spread == 1 else 0) + self.high

    @property
    def halo(self) -> int:
        """Positions of a neighbouring strip that it needs."""
        overlap = self.taps if self.spread == self.low else self.taps - 1
        return self.taps - 1 if self.spread == 1 else overlap // self.spread

    @property
    def fits(self) -> bool:
        """`IsConvSuitableForSpaceToBatch`: strides and padding that strips allow, and strips wider than a halo."""
        if self.spread > 1:
            if self.stride != 1 or (self.low == 0 and self.taps != 1):
                return False
            if self.low not in (0, self.spread - 1, self.spread):
                return False
            if self.low == self.spread and self.padded < 3 * SPLITS:
                return False
        return self.halo <= -(-self.padded // SPLITS)

    @property
    def least(self) -> int:
        """Least positions of a strip for its part of the result."""
        return math.ceil(math.ceil(self.made / SPLITS) / self.spread) * self.stride

    def first(self, pooled: int) -> int:
        """Strip width at the start of a chain; 0: none. `pooled`: stride of a pooling that follows, or 1."""
        if self.padded < 2 * SPLITS:
            return 0
        width = self.least
        while width * SPLITS < self.padded or (width // self.stride) % pooled:
            width += self.stride
        return width

    def following(self, width: int) -> int:
        """The width to which strips of `width` positions change before it."""
        needed = self.least
        while needed * SPLITS + self.halo < self.padded or needed < self.halo - self.low:
            needed += self.stride
        if needed < width and width % self.stride == 0 and self.spread == 1:
            return width
        return needed

    def result(self, width: int) -> int:
        """The strip width of its result, for strips of `width` positions."""
        return width // self.stride * self.spread


def strip_widths(program: Lowered) -> dict[int, int]:
    """Arrays in strips -> positions in each strip."""
    if not any(step.kind == "convolution" for step in program.steps):
        return {}
    return _Widths(program).found


def as_images(program: Lowered) -> Lowered:
    """Run elementwise steps on reshaped activations in the shape that convolutions use (`ReshapeMover`).

    A group norm's activations have one more dim, for groups of features.
    """
    known: dict[int, tuple[int, ...]] = {}
    for step in program.steps:
        if step.kind == "convolution" and len(step.reads) == 2:
            values = (*program.graph.ops[step.op].operands, Value(step.op))
            for array, value in zip((*step.reads, *step.writes), values, strict=True):
                shape = _viewed(program.arrays[array], program.graph.type_of(value).shape)
                if shape is not None:
                    known[array] = shape
    for steps in (program.steps, program.steps[::-1]):
        for step in steps:
            around = (*step.reads, *step.writes)
            shape = next((known[array] for array in around if array in known), None)
            if shape is not None and step.kind in ELEMENTWISE:
                size = math.prod(shape)
                same = [array for array in around if math.prod(program.arrays[array].shape or ()) == size]
                known |= {array: shape for array in same if array not in known}
    changed = {array: shape for array, shape in known.items() if program.arrays[array].shape != shape}
    if not changed:
        return program
    rewriter = Rewriter(program)
    for step in program.steps:
        rewriter.emit(step)
    for array, shape in changed.items():
        rewriter.arrays[array].shape = shape
    return rewriter.result()


def _viewed(array: Array, whole: tuple[int, ...]) -> tuple[int, ...] | None:
    """The local shape, as convolutions read it, of a value of global shape `whole`; None if unknown."""
    if array.shape is None or len(array.shape) == len(whole):
        return array.shape
    ways, left = divmod(math.prod(whole), max(1, math.prod(array.shape)))
    for dim in (0, 1):
        if not left and whole[dim] % max(1, ways) == 0:
            return (*whole[:dim], whole[dim] // ways, *whole[dim + 1 :])
    return None


def annotated_view(program: Lowered, step: Step) -> bool:
    """Whether a step makes an annotated value of another rank than convolutions read.

    It is a reshape of the whole activation, in row-major layout. Images of height one for a 1-D convolution, and
    updates of its kernel, do not count: dims of size 1 may be anywhere.
    """
    if step.kind not in ELEMENTWISE or Value(step.op) not in program.pinned:
        return False
    shape = program.arrays[step.writes[0]].shape
    if shape is None:
        return False
    whole = program.graph.ops[step.op].results[0].shape
    return sum(size > 1 for size in shape[2:]) != sum(size > 1 for size in whole[2:])


def as_annotated(program: Lowered, step: Step, shape: tuple[int, ...]) -> int:
    """Elements, with padding, of the shard of such a reshape, of local `shape` as convolutions read it."""
    whole = program.graph.ops[step.op].results[0].shape
    return math.prod(shape) * row_major(whole) // max(1, math.prod(whole))


def enlarges(program: Lowered, step: Step) -> bool:
    """Whether a broadcast repeats positions of images that a convolution reads through a reshape of another rank."""
    made = program.arrays[step.writes[0]].shape
    read = program.arrays[step.reads[0]].shape if step.reads else None
    if made is None or read is None or len(made) == len(program.graph.ops[step.op].results[0].shape):
        return False
    return math.prod(read) * SPLITS > math.prod(made)


def taps_of(program: Lowered, step: Step) -> tuple[int, bool]:
    """A convolution's taps along the last spatial dim, and whether it is the gradient of a kernel."""
    op = program.graph.ops[step.op]
    read = program.graph.type_of(op.operands[1]).shape[op.attrs["rhs"][-1]]
    written = op.results[0].shape[op.attrs["out"][-1]]
    return min(read, written), written < read


def convolved_whole(program: Lowered) -> set[int]:
    """Operands and results of convolutions outside of strips, which have the convolution's layout.

    Also elementwise values around windowed einsums.
    """
    arrays = program.arrays
    found: set[int] = set()
    around: set[int] = set()
    for step in program.steps:
        if step.kind != "convolution" or len(step.reads) < 2 or arrays[step.writes[0]].strips:
            continue
        if not taps_of(program, step)[1]:
            (found if ring(program, step) is None else around).update((step.reads[0], step.writes[0]))
    for steps in (program.steps, program.steps[::-1]) if around else ():
        for step in steps:
            if step.kind in ELEMENTWISE and not around.isdisjoint((*step.reads, *step.writes)):
                around.update((*step.reads, *step.writes))
    return found | around


def with_images_apart(program: Lowered) -> set[int]:
    """Strips combined elementwise with values that differ between images: their layout is free.

    The broadcast of these has the layout with least padding, and decides (group norms of 32 features).
    """
    arrays = program.arrays
    found = {
        step.writes[0] for step in program.steps if step.kind == "broadcast_in_dim" and arrays[step.writes[0]].strips
    }
    for steps in (program.steps, program.steps[::-1]) if found else ():
        for step in steps:
            if step.kind in ELEMENTWISE and not found.isdisjoint((*step.reads, *step.writes)):
                found.update(array for array in (*step.reads, *step.writes) if arrays[array].strips)
    return found


class _Widths:
    def __init__(self, program: Lowered) -> None:
        self.program, self.arrays, self.steps = program, program.arrays, program.steps
        self.found: dict[int, int] = {}
        self.computed: set[int] = set()  # descendants of convolutions
        self.spreading: dict[int, bool] = {}  # array -> `_broadcasts`
        for step in self.steps:
            for array in step.writes:
                self._broadcasts(array)
        for step in program.steps:
            width = self._made(step)
            if width:
                self.found[step.writes[0]] = width
                self._spread_over_strips(step, width)
            if step.kind == "convolution" or not self.computed.isdisjoint(step.reads):
                self.computed.update(step.writes)

    def _made(self, step: Step) -> int:
        """The strip width of a step's result; 0: no strips."""
        if step.kind == "convolution":
            return self._convolved(step)
        if not any(array in self.found for array in step.reads) or len(step.writes) != 1:
            return 0
        width = self.found.get(step.reads[0], 0)
        if step.kind in ELEMENTWISE or step.kind in ("concatenate", BARRIER):
            return self._common_width(step)
        if step.kind == "pad":
            attrs = self.program.graph.ops[step.op].attrs
            across = (0, len(attrs["low"]) - 1)
            return 0 if any(attrs[end][dim] for end in ("low", "high") for dim in across) else width
        if step.kind == "reduce_window":
            return self._pooled(step, width)
        if step.kind == "select_and_scatter":
            made = self._pooled(step, width)
            return width if made and width % self._stride(step) == 0 and self.found.get(step.reads[1]) == made else 0
        return 0

    def _common_width(self, step: Step) -> int:
        """The strip width of operands of an elementwise step or a concatenation; 0 if two widths meet."""
        made = math.prod(self.arrays[step.writes[0]].shape or ())
        found = {self.found[array] for array in step.reads if array in self.found}
        whole = [array for array in step.reads if array not in self.found]
        if step.kind == "concatenate":
            return 0 if whole or len(found) > 1 else found.pop()
        if annotated_view(self.program, step) or len(found) > 1:
            return 0
        if any(math.prod(self.arrays[array].shape or ()) == made and not self._broadcasts(array) for array in whole):
            return 0
        return found.pop()

    def _spread_over_strips(self, step: Step, width: int) -> None:
        """Broadcast values that differ between images first, then split into strips (`PropagateOnBroadcast`)."""
        for array in step.reads if step.kind in ELEMENTWISE else ():
            if array not in self.found and self._differs(array, 0):
                self.found[array] = width

    def _differs(self, array: int, dim: int) -> bool:
        """Whether an array broadcasts values that differ along one of its dims."""
        maker = self.arrays[array].maker
        step = self.steps[maker] if maker >= 0 else None
        if step is None or step.kind != "broadcast_in_dim" or not step.reads:
            return False
        dims = tuple(self.program.graph.ops[step.op].attrs["dims"])
        if dim not in dims:
            return False
        before = self.arrays[step.reads[0]].maker
        if before >= 0 and self.steps[before].kind == "broadcast_in_dim":
            return self._differs(step.reads[0], dims.index(dim))
        return True

    def _broadcasts(self, array: int) -> bool:
        """Whether an array is made of broadcasts only (`IsBroadcastTree`)."""
        if array not in self.spreading:
            maker = self.arrays[array].maker
            step = self.steps[maker] if maker >= 0 else None
            self.spreading[array] = step is not None and (
                step.kind in ("broadcast_in_dim", "iota")
                or ((step.kind in ELEMENTWISE or step.kind == "transpose") and all(map(self._broadcasts, step.reads)))
            )
        return self.spreading[array]

    def _convolved(self, step: Step) -> int:
        window = self._window(step)
        if window is None or not window.fits:
            return 0
        width = self.found.get(step.reads[0], 0)
        if width:
            return window.result(window.following(width))
        return window.result(window.first(self._pool_behind(step.writes[0])))

    def _window(self, step: Step) -> Window | None:
        """The window of a convolution of few images; None for gradients of kernels and windowed einsums."""
        if len(step.reads) != 2 or step.reads[1] in self.computed or ring(self.program, step) is not None:
            return None
        attrs = self.program.graph.ops[step.op].attrs
        images, made = (self.arrays[array].shape or () for array in (step.reads[0], step.writes[0]))
        if not len(images) == len(made) == len(attrs["lhs"]) > 2 or attrs["batch_groups"] != 1:
            return None
        if images[attrs["lhs"][0]] >= FEW or attrs["rhs_dilation"][-1] != 1:
            return None
        size, after = images[attrs["lhs"][-1]], made[attrs["out"][-1]]
        (low, high), stride, spread = attrs["padding"][-1], attrs["stride"][-1], attrs["lhs_dilation"][-1]
        taps = (size - 1) * spread + 1 + low + high - (after - 1) * stride
        kernel = self.arrays[step.reads[1]].shape
        if kernel is not None and len(kernel) == len(attrs["rhs"]):
            taps = kernel[attrs["rhs"][-1]]
        return Window(size, after, taps, stride, low, high, spread)

    def _pooled(self, step: Step, width: int) -> int:
        """The strip width after pooling; 0: pooling ends the strips."""
        attrs = self.program.graph.ops[step.op].attrs
        if any(attrs["padding"][-1]) or width < attrs["window"][-1]:
            return 0
        stride = attrs["stride"][-1]
        left = width % stride
        if left and step.kind == "reduce_window":
            size = (self.arrays[step.reads[0]].shape or (0,))[-1]
            width = width - left if (width - left) * SPLITS >= size else width + stride - left
        return int(width // stride)

    def _stride(self, step: Step) -> int:
        return int(self.program.graph.ops[step.op].attrs["stride"][-1])

    def _pool_behind(self, array: int, depth: int = 10) -> int:
        """The stride of a pooling after elementwise steps on an array; 1 without pooling."""
        if not depth:
            return 1
        for reader in self.arrays[array].readers:
            step = self.steps[reader]
            if step.kind in ("reduce_window", "select_and_scatter"):
                return max(1, self._stride(step))
            if step.kind in ("convolution", "transpose", *COLLECTIVES) or self._padding(step):
                continue
            for made in step.writes:
                if (found := self._pool_behind(made, depth - 1)) > 1:
                    return found
        return 1

    def _padding(self, step: Step) -> bool:
        if step.kind != "pad":
            return False
        attrs = self.program.graph.ops[step.op].attrs
        return any((*attrs["low"], *attrs["high"]))
