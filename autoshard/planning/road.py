"""The stages from a graph to a plan.

The solver chooses on every mesh (`search.py`, `one_mesh.py`) within the memory limit (`memory.py`). A plan by hand that
is predicted faster (`rivals.py`), or the candidate that compiles best (`refine.py`), may replace its choice. Where the
target's compiler is asked (`confirm.py`) and the choice does not fit, all of that is done again within less memory. The
last candidate becomes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.candidate import Chosen
from autoshard.planning.confirm import confirmed
from autoshard.planning.hints import kept
from autoshard.planning.meshes import check_refine
from autoshard.planning.options import PlanningOptions
from autoshard.planning.refine import refined
from autoshard.planning.rivals import or_by_hand
from autoshard.planning.search import best_mesh
from autoshard.planning.written import written_plan
from autoshard.plans.value import Options, Plan
from autoshard.solver import iopddl


def plan_graph(graph: Graph, meshes: Sequence[Mesh], options: PlanningOptions) -> Plan:
    """Plan a captured program; of several meshes, on the one with the shortest predicted step.

    Raises:
        NoPlanError: the memory limit or the hints exclude every plan.
    """
    chosen, info = confirmed(partial(_chosen, graph, meshes), graph, options)
    found = chosen.candidate
    return written_plan(
        graph,
        found.mesh,
        found.annotations,
        found.prediction,
        options=Options(
            memory=found.memory,
            hints=kept(graph.program, found.mesh, options.hints, options.keep),
            keep=options.keep,
            seed=options.seed,
        ),
        solver=found.solver,
        search=chosen.search,
        refined=chosen.refined,
        info={} if info is None else {"confirmed": asdict(info)},
    )


def _chosen(graph: Graph, meshes: Sequence[Mesh], options: PlanningOptions) -> Chosen:
    """The best candidate by prediction, or as compiled where that is asked for."""
    found, tried = best_mesh(graph, meshes, options)
    if options.dump_problem is not None:
        assert found.decision is not None
        options.progress("dump")
        iopddl.write(found.decision.problem, options.dump_problem, name=f"autoshard {graph.program.fingerprint[:12]}")
    hints, refinement = kept(graph.program, found.mesh, options.hints, options.keep), None
    if options.refine is not None:
        found, refinement = refined(found, graph, check_refine(options.refine, found.mesh), options, hints)
    elif options.rivals:
        options.progress("plans by hand")
        found = or_by_hand(found, graph, options, hints)
    return Chosen(found, tried, refinement)
