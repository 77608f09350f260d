"""Which steps of a program a TPU's compiler runs as one kernel, and which arrays it keeps.

Products take in their operands' makers and what their result goes through, so what is kept between forward and backward
pass are results of products, gathers, sums and collectives, and the sums of several arrays that many kernels read.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from autoshard.cost.compiler.kernels import LOOPS, Fusion, rank
from autoshard.cost.compiler.lowered import SLICE, Lowered, Step
from autoshard.cost.compiler.tpu.conv_loops import ring
from autoshard.cost.compiler.tpu.loops import RING
from autoshard.cost.compiler.tpu.rewrite import convolved
from autoshard.cost.compiler.tpu.strip_widths import annotated_view, enlarges
from autoshard.cost.compiler.tpu.strips import halo_passes
from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.cost.machine.figures import figure, whole
from autoshard.graph.groups import ELEMENTWISE, INDEXED

MOVES = frozenset({"transpose", "reshape", "slice", "broadcast_in_dim", "concatenate", "pad", "reverse", SLICE})
"""Kinds that pass their operands' elements on."""


TAKING = INDEXED | {SLICE}
"""Kinds that read of an operand what they make."""


MOST_AGAIN = 64
"""Makers of what a step reads that are followed; what lies behind them counts as read. Chains of elementwise steps may
be thousands long, and be asked after at every step.
"""

LONGEST, WIDER = whole("fused_contraction"), figure("fused_width")
"""By the length of their contraction, products that are one kernel with several elementwise steps that read them."""


class TpuFusion(Fusion):
    """Products with what is elementwise around them, loops into everything."""

    recomputes = True

    def __init__(self, program: Lowered) -> None:
        """For one device's program."""
        super().__init__(program)
        self.ends: set[int] = set()  # roots of products' kernels
        self.again_of: dict[int, bool] = {}  # array -> `_runs_again`
        self.parted: set[int] = set()  # arrays that are kept for a device to take its part of
        self.around = convolved(program)  # arrays that convolutions read or make, and what is elementwise around them
        self.convolves = convolves(program)
        self.met: set[int] = set()  # arrays that meet, in a reader, what is made of them by other kernels

    def cluster(self) -> None:
        """A product's kernel goes on as long as one elementwise step alone reads what it made.

        Of two products that one step reads, the kernel of its last operand goes on and the other one ends (so compiled
        in either order). So do convolutions; of these the earlier one is taken all the same: what ResNet keeps between
        those that it adds is not predicted, and with the last one its memory is 13 % too low, with this one 4.
        """
        kernels: dict[int, list[int]] = {}  # last step of a product's kernel -> its steps
        joins: dict[int, list[tuple[int, list[int]]]] = {}  # step -> ends of kernels that go on there, through what
        for number, step in enumerate(self.steps):
            if self.root[number] != number:
                continue
            if step.kind in CONTRACTIONS:
                if not (step.parts >= RING or ring(self.program, step) is not None):
                    kernels[number] = [number]
                    self._join(number, number, joins)
                continue
            ends: list[tuple[int, list[int]]] = [(last, []) for last in self._continues(step) if last in kernels]
            ends += [(last, way) for last, way in joins.pop(number, ()) if kernels.keys().isdisjoint(way)]
            if ends:
                convolution = self.steps[kernels[ends[0][0]][0]].kind == "convolution"
                last, way = min(ends, key=lambda end: kernels[end[0]][0]) if convolution else ends[0]
                kernels[number] = [*kernels.pop(last), *way, number]
                self._join(number, kernels[number][0], joins)
        for last, members in kernels.items():
            for member in members:
                self.root[member] = last
            self.ends.add(last)
        self.met = self._met()
        self.met = {array for array in self.met if self._reads(self.steps[self.arrays[array].maker], self._more(array))}
        self.again_of.clear()

    def _more(self, array: int) -> float:
        """Bytes of an array and some smaller ones: who reads more reads several arrays of its size."""
        return 1.25 * self.arrays[array].bytes

    def _met(self) -> set[int]:
        """Arrays of several operands of which a reader also needs something that other kernels make of them.

        As a mean that is taken off: so no kernel could hold all that lies between, and they are kept (XLA's
        `InstructionFusion`: what is not effectively unary must be fusible on all paths). A loop of one array is not.
        """
        candidates = {array: 1 << place for place, array in enumerate(self._of_several())}
        if not candidates or self.convolves:
            return set()
        found: set[int] = set()
        reach: list[int] = []  # step -> candidates that it is made of
        apart: list[int] = []  # step -> those on a way with other kernels
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

    def _enlarged(self, step: Step, array: int) -> bool:
        """Whether an elementwise result, not a single number, is broadcast: nothing takes in the maker of that.

        As the mean and the root that a normalisation needs for each row.
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
        """Elementwise results of several operands of their rank, more bytes than they make, read more than once."""
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

    def _join(self, number: int, product: int, joins: dict[int, list[tuple[int, list[int]]]]) -> None:
        """Note the step at which all that several elementwise readers make of a product is one array again, if any.

        The kernel of the product goes on to there if its contraction is short; else readers make that again.
        """
        made = self.steps[number].writes[0]
        size = self.arrays[made].elements
        if len(self.arrays[made].readers) < 2 or self.arrays[made].returned or self.convolves:
            return
        width = (self.arrays[made].shape or (size,))[-1]
        if self.steps[product].flops > 2 * max(LONGEST, WIDER * width) * size:
            return
        waiting = sorted(self.arrays[made].readers)
        way: list[int] = []
        while waiting and len(way) < MOST_AGAIN:
            reader = heapq.heappop(waiting)
            if way and reader == way[-1]:
                continue
            step = self.steps[reader]
            if len(step.writes) != 1 or step.kind not in ELEMENTWISE or self.arrays[step.writes[0]].elements != size:
                return
            if all(one == reader for one in waiting):
                if any(self.steps[one].kind == SLICE for one in self.arrays[step.writes[0]].readers):
                    return  # a part is taken of it, and the whole made again
                joins.setdefault(reader, []).append((number, way))
                return
            if self.arrays[step.writes[0]].returned:
                return
            way.append(reader)
            for one in self.arrays[step.writes[0]].readers:
                heapq.heappush(waiting, one)

    def _kept(self, number: int, step: Step, array: int, readers: Sequence[int], kernels: int) -> bool:
        if number in self.ends or step.parts >= RING or array in self.met or self._enlarged(step, array):
            return True
        return super()._kept(number, step, array, readers, kernels)

    def _continues(self, step: Step) -> Iterator[int]:
        """The steps whose kernels one could be the end of: makers of what it alone reads, the last operand's first."""
        if len(step.writes) != 1 or not (step.kind in ELEMENTWISE or step.kind in ("reshape", "transpose")):
            return
        if self._widens(step) and len(self.arrays[step.writes[0]].readers) > 1:
            return
        size = self.arrays[step.writes[0]].elements
        for array in reversed(step.reads):
            read = self.arrays[array]
            if len(read.readers) == 1 and not read.returned and read.maker >= 0 and read.elements == size:
                yield read.maker

    def _widens(self, step: Step) -> bool:
        """Whether a step makes f32 of bf16: each reader does that for itself, and the narrow array is kept."""
        if step.kind != "convert" or not step.reads:  # of a constant behind a barrier
            return False
        read, made = self.arrays[step.reads[0]], self.arrays[step.writes[0]]
        return read.bytes * made.elements < made.bytes * read.elements and not made.returned

    def absorbs(self, step: Step) -> bool:
        """Loops, sums and products take in what is made elementwise; not so loops of permutes and some convolutions."""
        if step.parts >= RING or reads_from_memory(self.program, step):
            return super().absorbs(step)
        return super().absorbs(step) or step.kind in CONTRACTIONS

    def inlined(self, step: Step) -> bool:
        """Whatever makes each element of its result from few of its operands, gathers left out."""
        if step.kind == "broadcast_in_dim" and (self.arrays[step.writes[0]].strips or enlarges(self.program, step)):
            return False
        return step.kind in LOOPS and step.kind not in ("gather", "dynamic_update_slice")

    def takes(self, reader: int, number: int) -> bool:
        """Also in the middle of a product's kernel; a part is taken of what is kept, if something reads the whole."""
        step = self.steps[reader]
        if step.kind == "reduce_window":  # whose window may be padded
            return self.steps[number].kind == "pad"
        return self.absorbs(step) and not (step.kind == SLICE and self.steps[number].writes[0] in self.parted)

    def _repeated(self, number: int, step: Step) -> bool:
        """What is kept for such a part runs again in what reads the whole, if it is made of one array."""
        made = step.writes[0]
        return made in self.parted and not self._reads(step, self.arrays[made].bytes)

    def expensive(self, step: Step) -> bool:
        """Nothing elementwise is."""
        return False

    def reads_more(self, step: Step, kernels: int) -> bool:
        """Whether running in every reader moves more than one write and a read each.

        As seen: an elementwise result of two arrays runs again in three kernels, not in four; of three arrays in two,
        not in three; of four not in two; of one array, and what is smaller than that, in any number. What a device
        takes its part of is kept if anything else reads it.
        """
        if kernels > 1 and step.kind == "multiply" and annotated_view(self.program, step):
            return True
        if kernels > 1 and any(self.steps[reader].kind == SLICE for reader in self.arrays[step.writes[0]].readers):
            self.parted.add(step.writes[0])
            return True
        made = self.arrays[step.writes[0]].bytes
        return self._reads(step, (kernels + 1) * made / (kernels - 1)) if kernels > 1 else False

    def _reads(self, step: Step, bytes: float) -> bool:
        """Whether a step reads more than so many bytes, with what runs again for it."""
        arrays, again_of = self.arrays, self.again_of
        sizes: dict[int, int] = {}
        read = 0
        todo = [step]
        seen: set[int] = set()  # makers: there are as many ways to one as halves in a chain of sums
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
                taken = min(found.bytes, made) if one.kind in TAKING else found.bytes
                read += max(0, taken - sizes.get(array, 0))
                sizes[array] = max(sizes.get(array, 0), taken)
                if read > bytes:
                    return True
        return False

    def _runs_again(self, number: int) -> bool:
        """Whether all that reads an array takes its maker in: what it is made from is read then, not the array.

        As seen: the gradient of BERT's logits, read by two products and a sum, is made from the logits in each. Not so
        between convolutions: ResNet and U-Net keep what normalisations make.
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
    """Whether a convolution takes in nothing: a loop around permutes, and one of strips that need their neighbours."""
    return step.kind == "convolution" and (ring(program, step) is not None or halo_passes(program, step) > 1)


def convolves(program: Lowered) -> bool:
    """Whether most products are convolutions: not all copies around these are kernels here."""
    kinds = Counter(step.kind for step in program.steps)
    return kinds["convolution"] > kinds["dot_general"]
