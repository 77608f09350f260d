"""Makes a plan of annotations, whoever wrote them: once, as the last stage."""

from __future__ import annotations

from typing import Unpack

from autoshard.cost.breakdown import by_module
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations, with_regions
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.candidate import collective_totals
from autoshard.plans.annotated import Recorded, plan_of
from autoshard.plans.value import ModuleCost, Plan, Predicted, ReplicatedOp
from autoshard.strategies.guard import check_compiles, warn_of, wrong_sums


def written_plan(
    graph: Graph,
    mesh: Mesh,
    annotations: Annotations,
    prediction: Prediction | None = None,
    **recorded: Unpack[Recorded],
) -> Plan:
    """The plan of these annotations, with its prediction.

    Warns (`WrongSumsWarning`) where XLA would miscompute under annotations that the solver did not choose.

    Args:
        recorded: further fields of the plan, as they are.

    Raises:
        UncompilableError: the compiler would abort under such annotations.
    """
    if recorded.get("solver") is None:
        check_compiles(graph, annotations, mesh)
        recorded["wrong_sums"] = wrong_sums(graph, annotations, mesh)
        warn_of(recorded["wrong_sums"])
    prediction = prediction or predict(graph, annotations, mesh)
    annotations = with_regions(graph, annotations, prediction.specs)
    recorded["predicted"] = totals(prediction, graph)
    recorded["info"] = {**recorded.get("info", {}), "bars": prediction.bars.as_info()}
    recorded["replicated_ops"] = tuple(
        ReplicatedOp(op.op, op.module, op.reason, op.cost_s) for op in prediction.replicated_ops
    )
    return plan_of(graph, mesh, annotations, outputs=prediction.specs, **recorded)


def totals(prediction: Prediction, graph: Graph) -> Predicted:
    """A prediction as a plan records it: collectives summed per kind and axes, also per module."""
    return Predicted(
        step_time_s=prediction.step_time_s,
        compute_s=prediction.compute_s,
        communication_s=prediction.communication_s,
        overlapped_s=prediction.overlapped_s,
        mfu=prediction.mfu,
        collectives=collective_totals(prediction.collectives),
        peak_memory_bytes=prediction.peak_memory_bytes,
        modules=tuple(
            ModuleCost(*place, share.compute_s, share.communication_s, collective_totals(share.collectives))
            for place, share in by_module(graph, prediction).items()
        ),
    )
