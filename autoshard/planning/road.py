"""The stages from a graph to a plan.

What is recomputed may be left open (`remat.py`). The solver chooses on every mesh (`search.py`, `one_mesh.py`) within
the memory limit (`memory.py`). A plan by hand that is predicted faster (`rivals.py`), or the candidate that compiles
best (`refine.py`), may replace its choice. Where the target's compiler is asked (`confirm.py`) and the choice does not
fit, all of that is done again within less memory. The last candidate becomes the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.planning.candidate import Chosen
from autoshard.planning.confirm import confirmed
from autoshard.planning.hints import kept
from autoshard.planning.meshes import check_refine
from autoshard.planning.one_mesh import candidate_on
from autoshard.planning.options import PlanningOptions, RematOption
from autoshard.planning.refine import refined
from autoshard.planning.remat import Recomputed
from autoshard.planning.rivals import or_by_hand
from autoshard.planning.search import Find, best_mesh
from autoshard.planning.written import written_plan
from autoshard.plans.json_format import plain
from autoshard.plans.remat import ALL, PRODUCTS, Blocks, Remat
from autoshard.plans.value import Options, Plan
from autoshard.program import Program
from autoshard.solver import iopddl
from autoshard.stablehlo.reader import build_graph


def plan_graph(graph: Graph, meshes: Sequence[Mesh], options: PlanningOptions) -> Plan:
    """Plan a captured program; of several meshes, on the one with the shortest predicted step.

    Raises:
        NoPlanError: the memory limit or the hints exclude every plan.
    """
    return _planned(partial(candidate_on, graph, known={}), meshes, options)


def plan_model(
    capture: Callable[[Remat | None], Program],
    blocks: Sequence[Blocks],
    remat: RematOption,
    meshes: Sequence[Mesh],
    options: PlanningOptions,
) -> Plan:
    """Plan a program of which it may be open what is recomputed; otherwise as `plan_graph`.

    Args:
        capture: the program; None: with its own checkpoints.
        blocks: of its model, which may be recomputed; of a forward pass, none.

    Raises:
        ValueError: `remat` is another word.
    """
    if remat == "auto" and blocks:
        return _planned(Recomputed(tuple(blocks), capture).candidate, meshes, options)
    options.progress("capture")
    program = capture(remat_of_all(remat, blocks))
    options.progress("graph")
    return plan_graph(build_graph(program), meshes, options)


def remat_of_all(remat: RematOption, blocks: Sequence[Blocks]) -> Remat | None:
    """What is recomputed where all blocks are treated alike; None: what the program's own checkpoints say.

    Raises:
        ValueError: `remat` is another word.
    """
    if remat not in get_args(RematOption):
        raise ValueError(f"remat is {', '.join(get_args(RematOption))}, not {remat!r}")
    if remat == "none":
        return {}
    paths = [path for several in blocks for path in several]
    level = {"products": PRODUCTS, "full": ALL}.get(remat)
    return dict.fromkeys(paths, level) if level is not None and paths else None


def _planned(find: Find, meshes: Sequence[Mesh], options: PlanningOptions) -> Plan:
    chosen, info = confirmed(partial(_chosen, find, meshes), options)
    found, graph = chosen.candidate, chosen.graph
    rates = (round(each, 8) for each in found.prices)
    prices = dict(zip(("kernels", "collectives"), rates, strict=True)) if found.prices != (1.0, 1.0) else None
    said = {"confirmed": info, "remat": found.remat, "prices": prices, "hidden": round(found.hidden, 4) or None}
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
        info={name: plain(each) for name, each in said.items() if each is not None},
    )


def _chosen(find: Find, meshes: Sequence[Mesh], options: PlanningOptions) -> Chosen:
    """The best candidate by prediction, or as compiled where that is asked for."""
    found, tried = best_mesh(find, meshes, options)
    graph = Chosen(found).graph
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
