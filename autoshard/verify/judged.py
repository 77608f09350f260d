"""Classifies differences between captured program and PyTorch in `verify --run`: excused, undecided, or faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import LoweringError
from autoshard.frontends.tracing.optimizer import STEADY_STEP
from autoshard.program import AtenOp, Program
from autoshard.sources import Source
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.batches import random_batch
from autoshard.verify.eager import Comparison, EagerSteps, named
from autoshard.verify.run import CAUSES, MAX_EXCUSED, ROUNDS_ON_ONE_DEVICE, TOLERANCE

NORM = next(cause for cause, words in CAUSES.items() if "batch_norm" in words)


class Causes:
    """Which results of a program depend on ops that XLA may compute otherwise than PyTorch (`CAUSES`)."""

    def __init__(self, program: Program, model: torch.nn.Module) -> None:
        """`model` says which modules are batch norms: a switch computes these in other ops."""
        graph = build_graph(program)
        norms = {path for path, m in model.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)}
        of_aten = {op.index: _cause(op, norms) for op in program.ops}
        of_op: list[str | None] = []
        for op in graph.ops:
            own = None if op.aten is None else of_aten.get(op.aten)
            of_op.append(own or next((of_op[v.op] for v in op.operands if of_op[v.op]), None))
        results = zip(program.outputs, graph.outputs, strict=True)
        self._of = {output.name: of_op[value.op] for output, value in results}
        self._any = next(filter(None, self._of.values()), None)

    def __call__(self, name: str, *, first_step: bool = True) -> str | None:
        """The cause that a result depends on; after the first step also by way of updated tensors."""
        if not first_step:
            return self._any
        return self._of.get(f"{name}.grad", self._of.get(name))


def _cause(op: AtenOp, norms: set[str]) -> str | None:
    if op.module in norms:
        return NORM
    return next((said for said, words in CAUSES.items() if any(word in op.name for word in words)), None)


@dataclass(frozen=True)
class Said:
    """Outcome of the captured program.

    Attributes:
        compared: number of results, parameters, buffers and states.
        excused: name and cause of those whose error is at most `MAX_EXCUSED` of their largest value.
        undecided: names of those for which PyTorch's own float32 error is above that.
        faults: names of those that differ from PyTorch's.
        refused: why nothing was compared.
    """

    compared: int = 0
    excused: tuple[tuple[str, str], ...] = ()
    undecided: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    refused: str = ""


def of_captured(
    program: Program,
    source: Source,
    model: torch.nn.Module,
    batches: Sequence[Any],
    because: Causes | None,
    optimizer: str | None,
    tolerance: float = TOLERANCE,
) -> Said:
    """Run a step of the captured program on one device, and classify its errors; float64 starts from the same state.

    The step is PyTorch's second, so that no state is zero, or a later one where an optimizer's first steps are other
    programs (RAdam). `optimizer` is a class.
    """
    found = Said()
    for warm in (0,) if optimizer is None else (1, int(STEADY_STEP)):
        more = [random_batch(source, model, number, program.reads) for number in range(len(batches), warm + 1)]
        try:
            made = EagerSteps(source, [*batches, *more][: warm + 1], warm, model, warm).of_program(program)
        except LoweringError as error:
            found = Said(refused=str(error))
            continue
        found = judged(made, because, optimizer, tolerance)
        if not found.faults:
            break
    return found


def judged(made: Comparison, because: Causes | None, optimizer: str | None, tolerance: float) -> Said:
    """Classify each tensor whose error exceeds `tolerance` of its largest element, after one step.

    A parameter with a float32 error in PyTorch too is judged under SGD alone: other optimizers divide by moments, which
    turns a gradient of pure rounding into a full step.
    """
    most = max(MAX_EXCUSED, tolerance)
    excused, undecided, faults = [], [], []
    for off in made.off:
        if off.off <= tolerance * off.largest:
            continue
        kind, name = off.key
        said = f"{named(off.key)} of the captured program"
        little = off.off <= max(most * off.largest, tolerance * off.scale)
        cause = because(name or kind) if because is not None else None
        if off.share > 1 and not (cause and off.off <= most * off.largest):
            faults.append(said)
        elif little:
            excused.append((said, cause if cause is not None and off.share > 1 else ROUNDS_ON_ONE_DEVICE))
        elif kind != "parameter" or optimizer in (None, "SGD"):
            undecided.append(said)
    return Said(made.names, tuple(excused), tuple(undecided), tuple(faults))
