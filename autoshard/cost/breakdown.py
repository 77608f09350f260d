"""Where a step's time goes: predicted kernels and collectives, per module and phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.cost.machine.collectives import Collective
from autoshard.cost.predict import Prediction
from autoshard.graph.ops import Graph
from autoshard.program import Argument


@dataclass
class Share:
    """What one module takes in one phase, its submodules left out.

    Attributes:
        compute_s, communication_s: seconds of a step.
        collectives: those that its ops cause.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    collectives: list[Collective] = field(default_factory=list)


def by_module(graph: Graph, prediction: Prediction) -> dict[tuple[str, str], Share]:
    """(module, phase) -> its share, in program order; the shares of all add up to the step.

    A kernel counts where the op is that it ends with; copies that belong to no op count with the kernel before them.
    """
    arguments = dict(zip(graph.arguments, graph.program.arguments, strict=True))

    def place(op: int | None) -> tuple[str, str]:
        if op in arguments:
            return _of_argument(arguments[op])
        aten = None if op is None else graph.ops[op].aten
        if op is None or aten is None or aten >= len(graph.program.ops):
            return "", ""
        return graph.ops[op].module, graph.program.ops[aten].phase

    found = {key: Share() for key in dict.fromkeys(place(each.id) for each in graph.ops)}
    owner: int | None = None
    for op, seconds in prediction.kernel_s:
        owner = owner if op is None else op
        found.setdefault(place(owner), Share()).compute_s += seconds
    for each, seconds in zip(prediction.collectives, prediction.collective_s, strict=True):
        share = found.setdefault(place(each.op), Share())
        share.communication_s += seconds
        share.collectives.append(each)
    return {key: share for key, share in found.items() if share.compute_s or share.communication_s}


def _of_argument(argument: Argument) -> tuple[str, str]:
    """The module of a parameter, also of its states; what is done with it before any op reads it is in no phase."""
    name = argument.of or argument.name
    return ("" if argument.role == "input" else name.rpartition(".")[0]), ""
