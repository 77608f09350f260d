"""`plan(..., refine=TARGET)`: the best compiled of a few candidates is taken, and what was compiled is kept."""

import json

import pytest

import autoshard
from autoshard.api import Plan
from autoshard.mesh import spec_axes
from autoshard.planning import refine
from autoshard.planning.one_mesh import candidate_on
from autoshard.planning.options import PlanningOptions
from autoshard.plans.value import RefineCandidate, Refinement
from autoshard.show.report import refined_lines
from autoshard.stablehlo.reader import build_graph
from tests.plans import made

torch = pytest.importorskip("torch")


def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def program():
    batch = (torch.zeros(32, 64), torch.zeros(32, 64))
    return autoshard.capture(network(), batch, loss_fn=torch.nn.functional.mse_loss, optimizer=sgd)


@pytest.fixture(scope="module")
def plain(program):
    return autoshard.plan_program(program, autoshard.Mesh((2, 2)))


@pytest.fixture(scope="module")
def refined(program):
    return autoshard.plan_program(program, autoshard.Mesh((2, 2)), refine="cpu")


def test_the_best_compiled_candidate_is_taken(refined):
    record = refined.refined
    assert record.target == "cpu"
    names = [each.name for each in record.candidates]
    assert names[0] == "optimum"
    assert 1 < len(names) == len(set(names)) <= refine.COMPILED
    times = {each.name: each.compiled_overlapped_s for each in record.candidates}
    assert times[record.chosen] == min(times.values())
    assert {"dp", "fsdp", "fsdpv2", "hsdp", "megatron", "fsdp-tp"} & set(names), "plans by hand have a place"
    predicted = next(each.predicted_s for each in record.candidates if each.name == record.chosen)
    assert refined.predicted.step_time_s == predicted


def test_the_predicted_choice_is_recorded_beside_it_and_is_the_plain_plan(refined, plain):
    assert plain.refined is None
    assert refined.refined.candidates[0].predicted_s == plain.predicted.step_time_s
    if refined.refined.chosen == "optimum":
        assert refined.parameters == plain.parameters


def test_a_refined_plan_is_read_back_and_shown(refined):
    assert Plan.from_json(refined.to_json()) == refined
    text = str(refined)
    assert "Refined for cpu" in text
    assert f"{refined.refined.chosen} *" in text
    assert "refined" not in json.loads(made.plan().to_json())


def test_a_rival_that_compiles_better_is_taken_with_its_own_prediction(program, plain, monkeypatch):
    """The compiled figures turned upside down: the worst is the best."""
    real = refine.compare_compiled

    def upside_down(*arguments):
        import dataclasses

        report, compiled = real(*arguments)
        return dataclasses.replace(
            report,
            judged=dataclasses.replace(report.judged, overlapped_s=1 / report.judged.step_time_s),
        ), compiled

    monkeypatch.setattr(refine, "compare_compiled", upside_down)
    found = autoshard.plan_program(program, autoshard.Mesh((2, 2)), refine="cpu")
    assert found.refined.chosen != "optimum"
    assert found.predicted.step_time_s > plain.predicted.step_time_s
    if found.solver is not None:  # a runner-up is proved against the same bound
        assert found.solver.bound == plain.solver.bound
        assert found.solver.status == "feasible"


def test_runners_up_do_not_split_as_the_optimum_does(program):
    graph, options = build_graph(program), PlanningOptions()
    optimum = candidate_on(graph, autoshard.Mesh((2, 2)), options, 60.0)
    rivals = {each.name: each for each in refine._rivals(optimum, graph, options, {})}
    assert {"another 0.weight", "another 2.weight", "another inputs", "dp", "megatron"} <= set(rivals)
    for name, values in refine._decisions(graph).items():
        if rival := rivals.get(f"another {name}"):
            chosen = {value: spec_axes(optimum.annotations.pins[value]) for value in values}
            assert all(spec_axes(rival.annotations.pins[value]) != axes for value, axes in chosen.items())


def test_hints_hold_for_every_candidate(program):
    found = autoshard.plan_program(program, autoshard.Mesh((2, 2)), hints={"0.weight": "[data],[]"}, refine="cpu")
    assert found.parameters["0.weight"].spec == (("data",), ())
    assert not {"dp", "megatron", "fsdp"} & {each.name for each in found.refined.candidates}


def test_a_target_that_the_mesh_does_not_lie_on_is_refused_before_anything_is_captured():
    with pytest.raises(ValueError, match="h100:1x8 has 8"):
        autoshard.plan(network(), torch.zeros(32, 64), mesh="2x2", refine="h100:8")
    with pytest.raises(ValueError, match="abacus"):
        autoshard.plan(network(), torch.zeros(32, 64), mesh="2x2", refine="abacus")


def test_the_device_is_the_targets_unless_it_is_given():
    from autoshard.planning.meshes import meshes_for

    assert meshes_for("2x4", None, None, "h100:8")[0].device == "h100:8"
    assert meshes_for("2x4", None, "h200", "h100:8")[0].device == "h200"
    assert meshes_for("2x2", None, None, "cpu")[0].device == "cpu"


def test_what_could_not_be_compiled_says_why():
    rows = (
        RefineCandidate("optimum", 1e-3, 1e-3, 2e-3, 1.5e-3, 10**9),
        RefineCandidate("dp", 2e-3, 2e-3, note="the compiler ran out of memory"),
    )
    lines = refined_lines(Refinement("h100:8", "optimum", rows))
    assert "2 candidates compiled" in lines[0]
    assert "optimum *" in lines[2]
    assert lines[3].endswith("the compiler ran out of memory")
