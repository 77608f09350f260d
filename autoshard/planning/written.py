"""From annotations, whoever wrote them, to what is predicted of them and to the plan that records both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoshard.mesh import Mesh

if TYPE_CHECKING:
    from autoshard.cost.machine.collectives import Collective
    from autoshard.cost.predict import Prediction
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph
    from autoshard.plans.value import CollectiveTotal, Options, Plan, Predicted, ReplicatedOp, SolverInfo


def written_plan(
    graph: Graph,
    mesh: Mesh,
    annotations: Annotations,
    prediction: Prediction | None = None,
    *,
    options: Options | None = None,
    solver: SolverInfo | None = None,
) -> Plan:
    """The plan that annotations make, whoever wrote them, with what is predicted of it.

    Warns (`WrongSumsWarning`) where XLA would compute wrong numbers under annotations that no solver chose.

    Raises:
        UncompilableError: the compiler would abort under such annotations.
    """
    from autoshard.cost.predict import predict
    from autoshard.plans.value import plan_of
    from autoshard.strategies.guard import check_compiles, warn_of, wrong_sums

    if solver is None:
        check_compiles(graph, annotations, mesh)
    wrong = () if solver is not None else wrong_sums(graph, annotations, mesh)
    warn_of(wrong)
    predicted = predict(graph, annotations, mesh) if prediction is None else prediction
    return plan_of(
        graph,
        mesh,
        annotations,
        options=options,
        predicted=totals(predicted, graph),
        solver=solver,
        replicated_ops=replicated_ops(predicted),
        wrong_sums=wrong,
        outputs=predicted.specs,
    )


def totals(prediction: Prediction, graph: Graph | None = None) -> Predicted:
    """What a plan records of a prediction: collectives summed per kind and axes; with its graph, also per module."""
    from autoshard.cost.breakdown import by_module
    from autoshard.plans.value import ModuleCost, Predicted

    shares = {} if graph is None else by_module(graph, prediction)
    return Predicted(
        step_time_s=prediction.step_time_s,
        compute_s=prediction.compute_s,
        communication_s=prediction.communication_s,
        overlapped_s=prediction.overlapped_s,
        mfu=prediction.mfu,
        collectives=_summed(prediction.collectives),
        peak_memory_bytes=prediction.peak_memory_bytes,
        modules=tuple(
            ModuleCost(*place, share.compute_s, share.communication_s, _summed(share.collectives))
            for place, share in shares.items()
        ),
    )


def _summed(collectives: Iterable[Collective]) -> tuple[CollectiveTotal, ...]:
    from autoshard.plans.value import CollectiveTotal

    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for one in collectives:
        entry = found.setdefault((one.kind, one.axes), [0, 0])
        entry[0] += one.count
        entry[1] += one.count * one.bytes
    return tuple(CollectiveTotal(*key, *entry) for key, entry in sorted(found.items()))


def replicated_ops(prediction: Prediction) -> tuple[ReplicatedOp, ...]:
    """What a plan records of the ops that have no rule."""
    from autoshard.plans.value import ReplicatedOp

    return tuple(ReplicatedOp(op.op, op.module, op.reason, op.cost_s) for op in prediction.replicated_ops)
