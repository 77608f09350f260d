"""PyTorch's eager runtime on a GPU: aten ops in order, each a kernel that reads its operands and writes its results.

Views are free. What PyTorch has one kernel for and a capture takes apart is one kernel again: a bias added to a
product, and each pass through a module without children and products, such as a normalisation, an activation or a loss,
whose gradient computes again what it needs. Parameters are gathered once for each pass (FSDP's
`reshard_after_forward`), and gradients are summed in the dtype of their parameter.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby

from autoshard.cost.compiler.backend import Backend
from autoshard.cost.compiler.kernels import Fusion, Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, REPEATABLE, SLICE, SUMS, Lowered, Step
from autoshard.cost.compiler.rewrite import Rewriter
from autoshard.cost.compiler.schedule import Dependencies
from autoshard.cost.machine.compute import MATRIX_WORK
from autoshard.cost.machine.device import Device
from autoshard.cost.machine.libraries import Attention
from autoshard.cost.passes import Passes
from autoshard.dtypes import dtype_bytes
from autoshard.graph.groups import BARRIER
from autoshard.graph.ops import Graph

MOVES = COLLECTIVES | {BARRIER, SLICE}


@dataclass(frozen=True)
class Eager:
    """PyTorch without a compiler as the runtime, on GPUs.

    Attributes:
        attention: the library that computes it: FlashAttention-2 (`flash`), `cudnn`, or the first FlashAttention in
            Triton (`triton`).
        gathers_again: whether parameters are gathered again for the backward pass (FSDP's `reshard_after_forward`).
    """

    attention: Attention = "flash"
    gathers_again: bool = True


def _views(graph: Graph, op: int) -> bool:
    """Whether an op is of a view; captures are functional, and call views copies."""
    aten = graph.ops[op].aten
    if aten is None or aten >= len(graph.program.ops):
        return False
    kind = graph.program.ops[aten].name.removeprefix("aten.").partition(".")[0]
    return kind.endswith("_copy") and kind != "_to_copy"


def without_views(program: Lowered) -> Lowered:
    """The program with views read as what they are views of; those of a part are barriers, which share its buffer.

    A barrier holds back no arguments: FSDP gathers parameters ahead of a pass that computes again.
    """
    rewriter = Rewriter(program)
    for step in program.steps:
        if step.kind == BARRIER:
            reads = [rewriter.instead.get(old, old) for old in step.reads]
            passed = {new: old for new, old in zip(step.writes, reads, strict=True) if rewriter.arrays[old].maker < 0}
            rewriter.instead.update(passed)
            held = [(old, new) for new, old in zip(step.writes, reads, strict=True) if new not in passed]
            rewriter.emit(replace(step, reads=tuple(old for old, _ in held), writes=tuple(new for _, new in held)))
        elif step.kind in MOVES or not step.reads or not _views(program.graph, step.op):
            rewriter.emit(step)
        elif rewriter.arrays[step.writes[0]].bytes < rewriter.arrays[step.reads[0]].bytes:
            rewriter.emit(replace(step, kind=BARRIER, reads=step.reads[:1]))
        else:
            rewriter.instead[step.writes[0]] = rewriter.instead.get(step.reads[0], step.reads[0])
    return rewriter.result()


def widened_first(program: Lowered) -> Lowered:
    """The program with sums of gradients behind the casts to their parameters' dtype."""
    rewriter, done = Rewriter(program), set[int]()
    for number, step in enumerate(program.steps):
        readers = program.arrays[step.writes[0]].readers if step.kind in SUMS else []
        cast = program.steps[readers[0]] if len(readers) == 1 else None
        if number in done:
            continue
        backward = program.graph.phase(step.op) == "backward"
        if not backward or cast is None or cast.kind != "convert" or step.collective is None:
            rewriter.emit(step)
            continue
        before, after = (dtype_bytes(program.arrays[each.writes[0]].dtype) for each in (step, cast))
        source, dtype = program.arrays[step.reads[0]], program.arrays[cast.writes[0]].dtype
        wide = rewriter.array(cast.writes[0], source.bytes * after // before, source.shape)
        collective = replace(step.collective, bytes=step.collective.bytes * after // before)
        rewriter.emit(replace(cast, reads=step.reads, writes=(wide,)))
        rewriter.emit(replace(step, reads=(wide,), writes=cast.writes, collective=collective))
        rewriter.arrays[wide].dtype = dtype
        done.add(readers[0])
    return rewriter.result()


class Gathers:
    """Which parameters a program gathers, and for which of its passes."""

    def __init__(self, program: Lowered) -> None:
        """For a program before fusion."""
        graph, arrays = program.graph, program.arrays
        given = [number for number, array in enumerate(arrays) if array.maker < 0]
        roles = [argument.role for argument in graph.program.arguments]
        self.program = program
        self.weights = {array for array, role in zip(given, roles, strict=False) if role == "parameter"}
        """Arrays that are made of parameters alone."""
        for step in program.steps:
            if step.reads and step.kind not in MATRIX_WORK and self.weights.issuperset(step.reads):
                self.weights.update(step.writes)
        self.readers: dict[int, dict[tuple[str, bool], int]] = {}
        """Of each of them, pass -> an op that reads what is made of it."""
        for step in reversed(program.steps):
            found = {self.of(step): step.op}
            if self.is_made(step):
                found = {of: op for array in step.writes for of, op in self.readers.get(array, {}).items()}
            for array in self.weights.intersection(step.reads):
                self.readers.setdefault(array, {}).update(found)

    def is_made(self, step: Step) -> bool:
        """Whether all that a step makes is made of parameters alone."""
        return bool(step.reads) and self.weights.issuperset(step.writes)

    def of(self, step: Step) -> tuple[str, bool]:
        """The pass of a step: the phase, of the first micro-batch or the others."""
        aten, micro = self.program.graph.ops[step.op].aten, self.program.graph.program.micro_steps
        return self.program.graph.phase(step.op), micro is not None and aten is not None and aten >= micro.second

    def once(self) -> Lowered:
        """The program with equal steps on parameters made once, whatever is recomputed."""
        rewriter = Rewriter(self.program)
        known: dict[Hashable, tuple[int, ...]] = {}
        for step in self.program.steps:
            if not self.is_made(step) or (step.kind not in REPEATABLE and step.collective is None):
                rewriter.emit(step)
                continue
            reads = tuple(rewriter.instead.get(array, array) for array in step.reads)
            moved = None if step.collective is None else step.collective.axes
            made = [(rewriter.arrays[array].shape, rewriter.arrays[array].dtype) for array in step.writes]
            own = () if moved else tuple(self.program.graph.ops[step.op].attrs.items())
            first = known.setdefault((step.kind, reads, moved, own, *made), step.writes)
            if first == step.writes:
                rewriter.emit(step)
            rewriter.instead.update({old: new for old, new in zip(step.writes, first, strict=True) if old != new})
        return rewriter.result()

    def again(self) -> Lowered:
        """The program with what is gathered of parameters made once for each pass that reads it."""
        rewriter = Rewriter(self.program)
        copies: dict[tuple[str, bool], dict[int, int]] = {}  # pass -> array -> its copy
        gathered: set[int] = set()
        for step in self.program.steps:
            if not self.is_made(step):
                found = copies.get(self.of(step), {})
                rewriter.emit(replace(step, reads=tuple(found.get(array, array) for array in step.reads)))
            elif step.kind != "all-gather" and gathered.isdisjoint(step.reads):
                rewriter.emit(step)
            else:
                gathered.update(step.writes)
                readers = self.readers.get(step.writes[0]) or {self.of(step): step.op}
                for of, op in readers.items():
                    found = copies.setdefault(of, {})
                    found.update((array, rewriter.array(array)) for array in step.writes)
                    reads, writes = (tuple(found.get(a, a) for a in each) for each in (step.reads, step.writes))
                    moved = None if step.collective is None else replace(step.collective, op=op)
                    rewriter.emit(replace(step, op=op, reads=reads, writes=writes, collective=moved))
        return rewriter.result()


def step_times(program: Lowered) -> list[float]:
    """When each step runs, by aten op: before all that reads it, and what is made of parameters alone not sooner."""
    graph, steps, weights = program.graph, program.steps, Gathers(program)
    found = [math.inf if (aten := graph.ops[step.op].aten) is None else float(aten) for step in steps]
    for number in reversed(range(len(steps))):
        readers = {reader for array in steps[number].writes for reader in program.arrays[array].readers}
        own = math.inf if weights.is_made(steps[number]) and readers else found[number]
        found[number] = min((own, *(found[reader] for reader in readers)))
    return found


class EagerFusion(Fusion):
    """One kernel per aten op, and per pass through a module that PyTorch has a kernel for."""

    def __init__(self, program: Lowered) -> None:
        """For one device's program."""
        super().__init__(program)
        self.kernel_modules = _kernel_modules(program.graph)
        self.gathers = Gathers(program)
        self.index = step_times(program)

    def kernels(self) -> list[Kernel]:
        """All kernels, in the order in which they run."""
        steps = self.steps
        runs = self._runs()
        home = {number: place for place, (_, members) in enumerate(runs) for number in members}
        for product, total in self._biased().items():
            runs[home[product]][1].remove(product)
            runs[home[total]][1].insert(0, product)
            home[product] = home[total]
        again: list[list[int]] = []
        for place, (name, members) in enumerate(runs):
            read = (self.arrays[array].maker for number in members for array in steps[number].reads)
            before = dict.fromkeys(home[maker] for maker in read if maker >= 0 and home[maker] != place)
            saved = [each for each in before if isinstance(name, str) and runs[each][0] == name]
            again.append([*dict.fromkeys(number for each in saved for number in (*again[each], *runs[each][1]))])
        inside = {number: {place} for number, place in home.items()}
        for place, members in enumerate(again):
            for number in members:
                inside[number].add(place)
        return [
            self._of([*again[place], *members], place, inside) for place, (_, members) in enumerate(runs) if members
        ]

    def _runs(self) -> list[tuple[Hashable, list[int]]]:
        """Steps that run one after the other and share a name.

        Gathers of parameters, and casts before them, precede what reads them; sums of gradients follow what they sum.
        """
        steps, graph = self.steps, self.program.graph
        readers = [{one for array in step.writes for one in self.arrays[array].readers} for step in steps]
        module = [graph.ops[step.op].module for step in steps]
        early, late = set[int](), set[int]()
        for number in reversed(range(len(steps))):
            moves = steps[number].kind in COLLECTIVES
            if self.gathers.is_made(steps[number]) and (moves or not early.isdisjoint(readers[number])):
                early.add(number)
            elif moves and module[number] not in {module[reader] for reader in readers[number]}:
                late.add(number)
        order = sorted(range(len(steps)), key=lambda number: (self.index[number], number))
        within = (number for number in order if number not in early and number not in late)
        runs = [(name, list(members)) for name, members in groupby(within, self._name)]
        at = {number: place for place, (_, members) in enumerate(runs) for number in members}
        before, after = ([list[int]() for _ in range(len(runs) + 1)] for _ in range(2))
        for number in order:
            if number in late:
                makers = (self.arrays[array].maker for array in steps[number].reads)
                at[number] = max((at[maker] for maker in makers if maker in at), default=0)
                after[at[number]].append(number)
        for number in sorted(early, reverse=True):
            at[number] = min((at[reader] for reader in readers[number]), default=len(runs))
            before[at[number]].insert(0, number)
        found: list[tuple[Hashable, list[int]]] = []
        for place in range(len(runs) + 1):
            found += [(self._name(number), [number]) for number in before[place]]
            found += runs[place : place + 1]
            found += [(self._name(number), [number]) for number in after[place]]
        return found

    def _name(self, number: int) -> Hashable:
        """What steps that run one after the other as one kernel share: a module's path, or an aten op."""
        step = self.steps[number]
        if step.kind in MOVES or step.kind in MATRIX_WORK:
            return number, step.kind
        module = self.program.graph.ops[step.op].module
        return module if module in self.kernel_modules else (self.index[number],)

    def _biased(self) -> dict[int, int]:
        """Products -> the sum with a broadcast vector that alone reads each."""
        vectors = {self.index[number] for number, step in enumerate(self.steps) if step.kind == "broadcast_in_dim"}
        found: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            readers = self.arrays[step.writes[0]].readers if step.kind == "dot_general" else []
            if len(readers) == 1 and self.steps[readers[0]].kind == "add" and self.index[readers[0]] in vectors:
                found[number] = readers[0]
        return found

    def _of(self, members: Sequence[int], place: int, inside: Mapping[int, Set[int]]) -> Kernel:
        """A kernel; `inside`: the kernels that run each step."""
        steps, arrays = self.steps, self.arrays
        made = {array for number in members for array in steps[number].writes}
        reads = dict.fromkeys(array for number in members for array in steps[number].reads if array not in made)
        writes = tuple(
            array
            for number in members
            if min(inside[number]) == place
            for array in steps[number].writes
            if arrays[array].returned or any(inside[number].isdisjoint(inside[one]) for one in arrays[array].readers)
        )
        ends = [number for number in members if steps[number].kind == "scatter"] or members[-1:]
        ordered = (*(number for number in members if number not in ends), *ends)
        flops = sum(steps[number].flops for number in members)
        return Kernel(ordered, tuple(reads), writes, steps[ends[-1]].kind, place, flops=flops)


def _kernel_modules(graph: Graph) -> set[str]:
    """Modules without children and without products."""
    paths = {op.module for op in graph.ops}
    parents = {path.rpartition(".")[0] for path in paths}
    return paths - parents - {op.module for op in graph.ops if op.kind in MATRIX_WORK} - {""}


class EagerBackend(Backend):
    """PyTorch without a compiler."""

    alignment = 512
    reuses_results = False

    def __init__(self, device: Device, runtime: Eager) -> None:
        """For one device kind."""
        super().__init__(device)
        self.runtime = runtime

    @property
    def rewrites(self) -> Passes[Lowered]:
        """Views, casts and gathers as they run."""
        again = (lambda program: Gathers(program).again(),) if self.runtime.gathers_again else ()
        return Passes((without_views, widened_first, lambda program: Gathers(program).once(), *again))

    def fusion(self, program: Lowered) -> Fusion:
        """See `EagerFusion`."""
        return EagerFusion(program)

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """In the order of aten ops, as they are."""
        return list(range(len(kernels)))
