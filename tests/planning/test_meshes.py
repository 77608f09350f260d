"""Which meshes there are for a number of devices, and the search over them."""

import math
from types import SimpleNamespace

import pytest

from autoshard.graph.annotations import Annotations
from autoshard.mesh import Mesh
from autoshard.planning.meshes import candidate_meshes, plan_best
from autoshard.plans.value import NoPlanError, Plan, Predicted, SolverInfo, plan_of
from tests.plans import made as plans


def planner(times, bounds=None, asked=None):
    """Plans whose steps take `times[shape]`, proved optimal; `bounds`: what the solver proves before it has a plan."""

    def plan_on(mesh, seconds, watch):
        if asked is not None:
            asked.append((mesh.shape, seconds))
        time = times[mesh.shape]
        if time is None:
            raise NoPlanError(f"no plan on {mesh.shape}", 100.0 * mesh.size / mesh.shape[0])
        if watch is not None:
            watch("reduced", math.inf, -math.inf)
            watch("dual", math.inf, (bounds or {}).get(mesh.shape, 0.0))
        predicted = Predicted(time, time, 0.0, time, 0.1, (), 10)
        status = "time_limit" if seconds < 60 and (bounds or {}).get("slow") == mesh.shape else "optimal"
        solver = SolverInfo(status, time, time, 0.0, "made up")
        on = plans.graph(plans.program())
        return plan_of(on, mesh, Annotations({}), predicted=predicted, solver=solver), SimpleNamespace(mesh=mesh)

    return plan_on


MESHES = candidate_meshes(None, 8, "tpu-v5e")


def outcomes(plan):
    return {each.shape: each.outcome for each in plan.search}


def test_shapes_of_few_axes_come_first_and_the_shortest_step_wins():
    asked = []
    best, problem = plan_best(MESHES, planner({(8,): 4.0, (2, 4): 2.0, (4, 2): 3.0, (2, 2, 2): 5.0}, asked=asked), 60.0)
    assert [shape for shape, _ in asked] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert best.mesh.shape == problem.mesh.shape == (2, 4)
    assert [each.step_time_s for each in best.search] == [4.0, 2.0, 3.0, 5.0]


def test_a_shape_that_is_proved_to_be_no_better_is_given_up():
    times = {(8,): 4.0, (2, 4): 5.0, (4, 2): 3.0, (2, 2, 2): 1.0}
    best, _ = plan_best(MESHES, planner(times, {(2, 4): 4.5, (4, 2): 2.0, (2, 2, 2): 2.999}), 60.0)
    assert outcomes(best) == {(8,): "planned", (2, 4): "pruned", (4, 2): "planned", (2, 2, 2): "pruned"}
    pruned = best.search[1]
    assert (pruned.bound, pruned.step_time_s) == (4.5, None)
    assert "no plan is better than that on 8" in pruned.note
    assert best.mesh.shape == (4, 2)


def test_every_shape_has_a_part_of_the_time_and_the_best_is_solved_again():
    asked = []
    times = {(8,): 4.0, (2, 4): 2.0, (4, 2): 3.0, (2, 2, 2): 5.0}
    plan_best(MESHES, planner(times, {"slow": (2, 4)}, asked), 80.0)
    assert asked == [((8,), 20.0), ((2, 4), 20.0), ((4, 2), 20.0), ((2, 2, 2), 20.0), ((2, 4), 80.0)]


def test_shapes_without_a_plan_are_named_and_all_without_one_are_an_error():
    best, _ = plan_best(MESHES, planner({(8,): None, (2, 4): 2.0, (4, 2): None, (2, 2, 2): 5.0}), 60.0)
    assert outcomes(best)[4, 2] == "no plan"
    with pytest.raises(NoPlanError) as refusal:
        plan_best(MESHES, planner(dict.fromkeys([(8,), (2, 4), (4, 2), (2, 2, 2)])), 60.0)
    assert refusal.value.least == 100.0  # of the mesh that needs least


def test_on_one_switch_the_order_of_axes_is_a_name_only():
    times = {(8,): 4.0, (2, 4): 2.0, (2, 2, 2): 5.0}  # 4x2 is not planned at all
    best, _ = plan_best(candidate_meshes(None, 8, "h100"), planner(times), 60.0)
    assert outcomes(best)[4, 2] == "same"
    over_hosts, _ = plan_best(candidate_meshes(None, 8, "h100:2x4"), planner({**times, (4, 2): 1.0}), 60.0)
    assert over_hosts.mesh.shape == (4, 2)


def test_one_mesh_is_no_search():
    asked = []
    best, _ = plan_best([Mesh((2, 4))], planner({(2, 4): 1.0}, asked=asked), 60.0)
    assert (best.search, asked) == ((), [((2, 4), 60.0)])


def test_the_table_is_in_the_plan_its_file_its_report_and_its_page():
    times = {(8,): 4.0, (2, 4): 5.0, (4, 2): None, (2, 2, 2): 1.0}
    best, _ = plan_best(MESHES, planner(times, {(2, 4): 4.5}), 60.0)
    assert Plan.from_json(best.to_json()) == best
    assert [each.shape for each in Plan.from_json(best.to_json()).search] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    lines = str(best).splitlines()
    at = lines.index("Mesh shapes tried: 4, * as planned")
    assert [line.split()[0] for line in lines[at + 2 : at + 6]] == ["2x2x2", "8", "2x4", "4x2"]
    assert "Mesh shapes" in best.to_html()
    assert "pruned" in best.to_html()


def test_where_no_shape_has_a_plan_in_its_part_of_the_time_one_has_all_of_it():
    quick = planner({(8,): 4.0, (2, 4): 2.0, (4, 2): 3.0, (2, 2, 2): 5.0})

    def plan_on(mesh, seconds, watch):
        if seconds < 60:
            raise NoPlanError("time ran out", {(2, 4): 10.0}.get(mesh.shape, 20.0))
        return quick(mesh, seconds, watch)

    best, _ = plan_best(MESHES, plan_on, 60.0)
    assert best.mesh.shape == (2, 4)
    assert outcomes(best) == {(8,): "no plan", (2, 4): "planned", (4, 2): "no plan", (2, 2, 2): "no plan"}
