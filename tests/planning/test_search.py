"""The search over the mesh shapes of a number of devices."""

from types import SimpleNamespace

import pytest

from autoshard.api import Plan
from autoshard.graph.annotations import Annotations
from autoshard.mesh import Mesh
from autoshard.planning.candidate import Candidate
from autoshard.planning.meshes import candidate_meshes
from autoshard.planning.options import PlanningOptions
from autoshard.planning.search import best_mesh
from autoshard.plans.annotated import plan_of
from autoshard.plans.value import NoPlanError, Predicted, SolverInfo
from autoshard.solver.solve import GoalOutOfReachError
from tests.plans import made as plans


@pytest.fixture
def search():
    """Search over candidates whose steps take `times[shape]`, proved optimal; the plan that is made of the best.

    Args of the function: `bounds`, what the solver proves before it has a plan; `slow`, a shape that takes all time;
    `quick`, seconds below which nothing is found; `asked`, told of every shape with its seconds.
    """

    def searched(meshes, times, bounds=None, *, slow=None, quick=None, asked=None, seconds=60.0):
        graph = plans.graph(plans.program())

        def candidate_on(mesh, options, given, goal, others):
            if asked is not None:
                asked.append((mesh.shape, given))
            time = times[mesh.shape]
            if quick is not None and given < 60:
                raise NoPlanError("time ran out", quick.get(mesh.shape, 20.0))
            if time is None:
                raise NoPlanError(f"no plan on {mesh.shape}", 100.0 * mesh.size / mesh.shape[0])
            if (bounds or {}).get(mesh.shape, 0.0) >= goal:
                raise GoalOutOfReachError(bounds[mesh.shape])
            status = "time_limit" if given < 60 and slow == mesh.shape else "optimal"
            solver = SolverInfo(status, time, time, 0.0, "made up")
            prediction = SimpleNamespace(step_time_s=time, overlapped_s=time, peak_memory_bytes=10)
            return Candidate(mesh, Annotations({}), prediction, solver=solver)

        best, tried = best_mesh(candidate_on, meshes, PlanningOptions(time_limit=seconds))
        predicted = Predicted(best.time, best.time, 0.0, best.time, 0.1, (), 10)
        return Plan.of(
            plan_of(graph, best.mesh, best.annotations, predicted=predicted, solver=best.solver, search=tried)
        )

    return searched


MESHES = candidate_meshes(None, 8, "tpu-v5e")


def outcomes(plan):
    return {each.shape: each.outcome for each in plan.search}


def test_shapes_of_few_axes_come_first_and_the_shortest_step_wins(search):
    asked = []
    best = search(MESHES, {(8,): 4.0, (2, 4): 2.0, (4, 2): 3.0, (2, 2, 2): 5.0}, asked=asked)
    assert [shape for shape, _ in asked] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert best.mesh.shape == (2, 4)
    assert [each.step_time_s for each in best.search] == [4.0, 2.0, 3.0, 5.0]


def test_a_shape_that_is_proved_to_be_no_better_is_given_up(search):
    times = {(8,): 4.0, (2, 4): 5.0, (4, 2): 3.0, (2, 2, 2): 1.0}
    best = search(MESHES, times, {(2, 4): 4.5, (4, 2): 2.0, (2, 2, 2): 2.999})
    assert outcomes(best) == {(8,): "planned", (2, 4): "pruned", (4, 2): "planned", (2, 2, 2): "pruned"}
    pruned = best.search[1]
    assert (pruned.bound, pruned.step_time_s) == (4.5, None)
    assert "no plan is better than that on 8" in pruned.note
    assert best.mesh.shape == (4, 2)


def test_every_shape_has_a_part_of_the_time_and_the_best_is_solved_again(search):
    asked = []
    times = {(8,): 4.0, (2, 4): 2.0, (4, 2): 3.0, (2, 2, 2): 5.0}
    search(MESHES, times, slow=(2, 4), asked=asked, seconds=80.0)
    assert asked == [((8,), 20.0), ((2, 4), 20.0), ((4, 2), 20.0), ((2, 2, 2), 20.0), ((2, 4), 80.0)]


def test_shapes_without_a_plan_are_named_and_all_without_one_are_an_error(search):
    best = search(MESHES, {(8,): None, (2, 4): 2.0, (4, 2): None, (2, 2, 2): 5.0})
    assert outcomes(best)[4, 2] == "no plan"
    with pytest.raises(NoPlanError) as refusal:
        search(MESHES, dict.fromkeys([(8,), (2, 4), (4, 2), (2, 2, 2)]))
    assert refusal.value.least == 100.0  # of the mesh that needs least


def test_on_one_switch_the_order_of_axes_is_a_name_only(search):
    times = {(8,): 4.0, (2, 4): 2.0, (2, 2, 2): 5.0}  # 4x2 is not planned at all
    best = search(candidate_meshes(None, 8, "h100"), times)
    assert outcomes(best)[4, 2] == "same"
    over_hosts = search(candidate_meshes(None, 8, "h100:2x4"), {**times, (4, 2): 1.0})
    assert over_hosts.mesh.shape == (4, 2)


def test_one_mesh_is_no_search(search):
    asked = []
    best = search([Mesh((2, 4))], {(2, 4): 1.0}, asked=asked)
    assert (best.search, asked) == ((), [((2, 4), 60.0)])


def test_the_table_is_in_the_plan_its_file_its_report_and_its_page(search):
    times = {(8,): 4.0, (2, 4): 5.0, (4, 2): None, (2, 2, 2): 1.0}
    best = search(MESHES, times, {(2, 4): 4.5})
    assert Plan.from_json(best.to_json()) == best
    assert [each.shape for each in Plan.from_json(best.to_json()).search] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    lines = str(best).splitlines()
    at = lines.index("Mesh shapes tried: 4, * as planned")
    assert [line.split()[0] for line in lines[at + 2 : at + 6]] == ["2x2x2", "8", "2x4", "4x2"]
    assert "Mesh shapes" in best.to_html()
    assert "pruned" in best.to_html()


def test_where_no_shape_has_a_plan_in_its_part_of_the_time_one_has_all_of_it(search):
    times = {(8,): 4.0, (2, 4): 2.0, (4, 2): 3.0, (2, 2, 2): 5.0}
    best = search(MESHES, times, quick={(2, 4): 10.0})
    assert best.mesh.shape == (2, 4)
    assert outcomes(best) == {(8,): "no plan", (2, 4): "planned", (4, 2): "no plan", (2, 2, 2): "no plan"}
