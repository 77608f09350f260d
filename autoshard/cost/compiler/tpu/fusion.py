"""Fusion on TPU: which steps run as one kernel, and which arrays are materialised.

Contractions fuse their operands' producers and elementwise users of their result. So what is live between forward and
backward pass are results of contractions, gathers, reductions and collectives, and sums of several arrays with many
users.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from autoshard.cost.compiler.kernels import LOOPS, Fusion, rank
from autoshard.cost.compiler.lowered import SLICE, Array, Lowered, Step
from autoshard.cost.compiler.tpu.conv_loops import ring
from autoshard.cost.compiler.tpu.loops import RING
from autoshard.cost.compiler.tpu.rewrite import convolved
from autoshard.cost.compiler.tpu.strip_widths import annotated_view, enlarges
from autoshard.cost.compiler.tpu.strips import halo_passes
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.figures import of_kind
from autoshard.cost.machine.tiles import ROWS
from autoshard.graph.groups import ELEMENTWISE, INDEXED

MOVES = frozenset({"transpose", "reshape", "slice", "broadcast_in_dim", "concatenate", "pad", "reverse", SLICE})
"""Kinds that return their operands' elements."""


TAKING = INDEXED | {SLICE}
"""Kinds that read as much of an operand as they return."""


MOST_AGAIN = 64
"""Producers to follow before the rest counts as read. Chains of elementwise steps may be thousands long, and every step
asks.
"""

OPERATIONS = {"convert": 0, "erf": 40, "divide": 8}
"""Elementwise kind -> vector operations of an element; else 1."""

SHORTER = 8
"""Those of an error function of bf16. Not measured: of one alone 40 hold; GELUs of BERT, Whisper and ViT follow."""


class TpuFusion(Fusion):
    """Contractions with elementwise producers and users; loops into everything."""

    recomputes = True

    def __init__(self, program: Lowered, device: Device | None = None) -> None:
        """For one device's program."""
        super().__init__(program)
        kind = "" if device is None else device.kind
        self.stores_erf = bool(of_kind("stored_erf", kind))
        self.most_ops = of_kind("operations_again", kind)
        self.on_chip = math.inf if device is None else device.on_chip_bytes or math.inf
        self.ends: set[int] = set()  # roots of contractions' kernels
        self.again_of: dict[int, bool] = {}  # array -> `_runs_again`
        self.parted: set[int] = set()  # arrays materialised for a dynamic-slice of a device's shard
        self.around = convolved(program)  # operands and results of convolutions, and elementwise values around
        self.convolves = convolves(program)
        self.met: set[int] = set()  # arrays whose user also reads another kernel's result made from them

    def cluster(self) -> None:
        """Extend a contraction's kernel while its result has one elementwise user (epilogue fusion).

        If a user has two contractions as operands, it fuses with the last operand's (so compiled in either order), and
        the other is materialised. Of two convolutions it takes the earlier one: which of them a residual block keeps is
        not predicted, and the memory of such nets is closer so.
        """
        kernels: dict[int, list[int]] = {}  # last step of a contraction's kernel -> its steps
        for number, step in enumerate(self.steps):
            if self.root[number] != number:
                continue
            if step.kind in CONTRACTIONS:
                if not (step.parts >= RING or ring(self.program, step) is not None):
                    kernels[number] = [number]
                continue
            ends = [last for last in self._extendable(step) if last in kernels]
            if ends:
                convolution = self.steps[kernels[ends[0]][0]].kind == "convolution"
                last = min(ends, key=lambda end: kernels[end][0]) if convolution else ends[0]
                kernels[number] = [*kernels.pop(last), number]
        for last, members in kernels.items():
            for member in members:
                self.root[member] = last
            self.ends.add(last)
        self.met = self._met()
        self.met = {array for array in self.met if self._reads(self.steps[self.arrays[array].maker], self._more(array))}
        self.again_of.clear()

    def _more(self, array: int) -> float:
        """Bytes of an array and some smaller ones: a step that reads more reads several arrays of its size."""
        return 1.25 * self.arrays[array].bytes

    def _met(self) -> set[int]:
        """Arrays of several operands with a user that also needs another kernel's result made from them.

        Such as a mean that is subtracted: no kernel can hold all paths, so they are materialised (XLA's
        `InstructionFusion` fuses an op that is not effectively unary only if it can on all paths).
        """
        candidates = {array: 1 << place for place, array in enumerate(self._of_several())}
        if not candidates or self.convolves:
            return set()
        found: set[int] = set()
        reach: list[int] = []  # step -> candidates among its ancestors
        apart: list[int] = []  # step -> those with another kernel in between
        for step in self.steps:
            reached = hard = 0
            direct = []
            for array in dict.fromkeys(step.reads):
                maker = self.arrays[array].maker
                if maker < 0:
                    continue
                bits = reach[maker] | candidates.get(array, 0)
                reached |= bits
                fused = array not in found and self.inlined(self.steps[maker]) and self.absorbs(step)
                hard |= apart[maker] if fused else bits
                if array in candidates:
                    direct.append(array)
            reach.append(reached)
            apart.append(hard)
            found.update(array for array in direct if candidates[array] & hard)
        return found

    def _is_broadcast(self, step: Step, array: int) -> bool:
        """Whether an elementwise result of more than one element is broadcast: then it is materialised.

        Such as the mean and the root that a normalisation needs for each row.
        """
        if step.kind not in ELEMENTWISE or self.arrays[array].elements < 2 or self.convolves:
            return False
        todo = [array]
        while todo:
            size = self.arrays[todo[0]].elements
            for reader in self.arrays[todo.pop()].readers:
                one = self.steps[reader]
                if one.kind not in ("broadcast_in_dim", "reshape"):
                    continue
                if self.arrays[one.writes[0]].elements > size:
                    return True
                todo += one.writes
        return False

    def _of_several(self) -> Iterator[int]:
        """Elementwise results with several users and several operands of their rank, together larger than they are."""
        for number, step in enumerate(self.steps):
            if step.kind not in ELEMENTWISE or len(step.writes) != 1 or number in self.ends:
                continue
            made = self.arrays[step.writes[0]]
            if len(made.readers) < 2 or len(set(step.reads)) < 2:
                continue
            read = [self.arrays[array] for array in dict.fromkeys(step.reads)]
            large = [array for array in dict.fromkeys(step.reads) if not self._broadcast(array)]
            large = [array for array in large if rank(self.arrays[array]) >= rank(made)]
            if len(large) > 1 and sum(array.bytes for array in read) > made.bytes:
                yield step.writes[0]

    def _kept(self, number: int, step: Step, array: int, readers: Sequence[int], kernels: int) -> bool:
        if number in self.ends or step.parts >= RING or array in self.met or self._is_broadcast(step, array):
            return True
        return super()._kept(number, step, array, readers, kernels) or self._costs_more(step, kernels)

    def _extendable(self, step: Step) -> Iterator[int]:
        """The steps whose kernels `step` could extend: producers of operands without other users, last one first."""
        if len(step.writes) != 1 or not (step.kind in ELEMENTWISE or step.kind == "transpose"):
            return
        if self._converts_bf16(step) and len(self.arrays[step.writes[0]].readers) > 1:
            return
        size = self.arrays[step.writes[0]].elements
        for array in reversed(step.reads):
            read = self.arrays[array]
            if len(read.readers) == 1 and not read.returned and read.maker >= 0 and read.elements == size:
                yield read.maker

    def _converts_bf16(self, step: Step) -> bool:
        """Whether a step converts bf16 to f32: each user does that itself, and the bf16 array is materialised."""
        if step.kind != "convert" or not step.reads:  # a constant after a barrier
            return False
        read, made = self.arrays[step.reads[0]], self.arrays[step.writes[0]]
        return read.bytes * made.elements < made.bytes * read.elements and not made.returned

    def absorbs(self, step: Step) -> bool:
        """Loops, reductions and contractions fuse elementwise producers; not windowed einsums and some convolutions."""
        if step.parts >= RING or reads_from_memory(self.program, step):
            return super().absorbs(step)
        return super().absorbs(step) or step.kind in CONTRACTIONS

    def inlined(self, step: Step) -> bool:
        """Kinds whose result elements depend on few operand elements each, in the same tiles; no gathers."""
        if step.kind == "broadcast_in_dim" and (self.arrays[step.writes[0]].strips or enlarges(self.program, step)):
            return False
        return step.kind in LOOPS and step.kind not in ("gather", "dynamic_update_slice", "reshape")

    def takes(self, reader: int, number: int) -> bool:
        """Also in the middle of a contraction's kernel; a dynamic-slice reads materialised arrays with other users."""
        step = self.steps[reader]
        if step.kind == "reduce_window":  # its window may be padded
            return self.steps[number].kind == "pad"
        return self.absorbs(step) and not (step.kind == SLICE and self.steps[number].writes[0] in self.parted)

    def _repeated(self, number: int, step: Step) -> bool:
        """An array materialised for a dynamic-slice is recomputed in other users, if it is made from one array."""
        made = step.writes[0]
        return made in self.parted and not self._reads(step, self.arrays[made].bytes)

    def expensive(self, step: Step) -> bool:
        """No elementwise step but an error function, on some kinds of TPUs."""
        return self.stores_erf and step.kind == "erf"

    def reads_more(self, step: Step, kernels: int) -> bool:
        """Whether duplicating a step moves more bytes than one write and a read per user.

        As seen: an elementwise result of two arrays is duplicated into three kernels, not four; of three arrays into
        two, not three; of four not into two; of one array, or of smaller ones, into any number. The operand of a
        dynamic-slice is materialised if it has other users.
        """
        if kernels > 1 and step.kind == "multiply" and annotated_view(self.program, step):
            return True
        if kernels > 1 and any(self.steps[reader].kind == SLICE for reader in self.arrays[step.writes[0]].readers):
            self.parted.add(step.writes[0])
            return True
        made = self.arrays[step.writes[0]].bytes
        return self._reads(step, (kernels + 1) * made / (kernels - 1)) if kernels > 1 else False

    def _costs_more(self, step: Step, kernels: int) -> bool:
        """Whether a contraction's operand takes many vector operations an element that other kernels do, too.

        Of those larger than on-chip memory.
        """
        made = self.arrays[step.writes[0]]
        if step.kind not in ELEMENTWISE or made.bytes <= self.on_chip or not self._multiplied(made):
            return False
        todo, seen, operations, elsewhere = [step], {made.maker}, 0, kernels > 1
        while todo and len(seen) < MOST_AGAIN:
            one = todo.pop()
            if one.kind == "erf" and self.stores_erf:
                continue
            operations += self._operations(one)
            for array in one.reads:
                found = self.arrays[array]
                if found.elements == made.elements and found.maker not in seen and found.maker >= 0:
                    seen.add(found.maker)
                    if self._runs_again(array):
                        todo.append(self.steps[found.maker])
                        elsewhere = elsewhere or len(found.readers) > 1
        return elsewhere and operations > self.most_ops

    def _operations(self, step: Step) -> int:
        """Vector operations of an element of a step.

        An error function of bf16 takes few, unless rows are padded.
        """
        made = self.arrays[step.writes[0]]
        if step.kind == "erf" and made.dtype == "bf16" and not (made.shape or (0, 0))[-2:][0] % ROWS:
            return SHORTER
        return OPERATIONS.get(step.kind, 1) if step.kind in ELEMENTWISE else 0

    def _multiplied(self, array: Array) -> bool:
        """Whether a contraction reads an array, as it is or moved."""
        todo = list(array.readers)
        while todo:
            step = self.steps[todo.pop()]
            if step.kind in CONTRACTIONS:
                return True
            if step.kind in MOVES:
                todo += [reader for made in step.writes for reader in self.arrays[made].readers]
        return False

    def _reads(self, step: Step, bytes: float) -> bool:
        """Whether a step reads more than so many bytes, recomputed producers included."""
        arrays, again_of = self.arrays, self.again_of
        sizes: dict[int, int] = {}
        read = 0
        todo = [step]
        seen: set[int] = set()  # producers: a chain of adds has exponentially many paths to one
        while todo:
            one = todo.pop()
            made = arrays[one.writes[0]].bytes
            for array in dict.fromkeys(one.reads) if len(one.reads) > 1 else one.reads:
                found = arrays[array]
                if found.maker >= 0 and len(seen) < MOST_AGAIN:
                    again = again_of.get(array)
                    if self._runs_again(array) if again is None else again:
                        if found.maker not in seen:
                            seen.add(found.maker)
                            todo.append(self.steps[found.maker])
                        continue
                if 2 * found.elements <= arrays[step.writes[0]].elements:
                    continue  # a row's mean
                taken = min(found.bytes, made) if one.kind in TAKING else found.bytes
                read += max(0, taken - sizes.get(array, 0))
                sizes[array] = max(sizes.get(array, 0), taken)
                if read > bytes:
                    return True
        return False

    def _runs_again(self, number: int) -> bool:
        """Whether all users of an array fuse its producer, and so read the producer's operands instead.

        As seen: two dots and a sum each recompute the gradient of logits from the logits. Not so around convolutions:
        normalised activations are materialised.
        """
        if number not in self.again_of:
            self.again_of[number] = self._taken_by_all(number)
        return self.again_of[number]

    def _taken_by_all(self, number: int) -> bool:
        array = self.arrays[number]
        maker = self.steps[array.maker]
        if len(maker.writes) > 1 or array.returned or not self.inlined(maker) or array.maker in self.ends:
            return False
        if number in self.met:
            return False
        if len(array.readers) == 1:
            return True
        return number not in self.around and all(self.absorbs(self.steps[reader]) for reader in array.readers)


def reads_from_memory(program: Lowered, step: Step) -> bool:
    """Whether a convolution fuses no producers: a windowed einsum, or strips that need a halo exchange."""
    return step.kind == "convolution" and (ring(program, step) is not None or halo_passes(program, step) > 1)


def convolves(program: Lowered) -> bool:
    """Whether most contractions are convolutions: not all copies around these are kernels here."""
    kinds = Counter(step.kind for step in program.steps)
    return kinds["convolution"] > kinds["dot_general"]
