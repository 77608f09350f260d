"""A model and an optimizer trained by PyTorch, and what comes out of capture beside it; used by `eager.py` and tests.

`autoshard.verify.eager` compares; here are batches, and the outputs: the captured module, and under a plan on 2x4 what
`autoshard lower` writes and `plan.to_jax()`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import autoshard
from autoshard.api import Plan
from autoshard.mesh import Mesh
from autoshard.program import Program
from autoshard.sources import Source
from autoshard.verify.batches import random_batch
from autoshard.verify.eager import Comparison, EagerSteps, numbers_of

STEPS = 3
DEVICE = Path(__file__).resolve().parent / "zoo_device.toml"


class Pair(EagerSteps):
    """A model and an optimizer, three steps of which are compared; without an optimizer, gradients or outputs."""

    def __init__(self, source: Source, warm: int = 1) -> None:
        """`source` has a model with weights; `warm` as in `EagerSteps`, none without an optimizer."""
        warm = 0 if source.optimizer is None else warm
        super().__init__(source, [random_batch(source, source.model, number) for number in range(warm + STEPS)], warm)

    def captured(self, frontend: str) -> Program:
        """The program of its step."""
        model, optimizer = self.made()
        of = self.source
        return autoshard.capture(
            model, self.batches[0], loss_fn=of.loss_fn, optimizer=optimizer, train=of.train, frontend=frontend
        )


def of_program(pair: Pair, program: Program) -> Comparison:
    """The captured module on one device."""
    return pair.of_program(program)


def of_lower(pair: Pair, program: Program) -> Comparison:
    """The module that `autoshard lower` writes, on the devices of its mesh."""
    return pair.of_program(program, planned(program))


def of_to_jax(pair: Pair, program: Program) -> Comparison:
    """`plan.to_jax()`, from the first step on where it is captured; PyTorch takes the last one with what that gives."""
    first = 0 if pair.warm <= 1 else pair.warm
    model, optimizer = pair.made(first)
    step = planned(program).to_jax().step(program, optimizer, precision="highest")
    state = step.place(model, optimizer)
    found = []
    for batch in pair.batches[first:-1]:
        state, made = step(state, pair.inputs(batch, program))
        found.append(numbers_of(program, model, optimizer, step.fetch(state), made))
    step.restore(state, model, optimizer)
    return pair.compared([*found, *list(pair.taken(model, optimizer, pair.batches[-1:]))[1:]], first)


OUTPUTS: dict[str, Callable[[Pair, Program], Comparison]] = {
    "program": of_program,
    "lower": of_lower,
    "to_jax": of_to_jax,
}


def planned(program: Program) -> Plan:
    """A plan on 2x4 that splits much of a small program."""
    mesh = Mesh.parse("2x4", device=str(DEVICE))
    return autoshard.plan_program(program, mesh, rivals=False, time_limit=60)
