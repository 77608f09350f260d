"""What each other sharding of a tensor would cost."""

import pytest

import autoshard
from autoshard.api import Plan
from autoshard.plans.value import PlanError, PlanMismatchError
from autoshard.show.explanation import Alternative, Explanation

torch = pytest.importorskip("torch")

INPUTS = (torch.zeros(32, 64), torch.zeros(32, 64))


def network(width=256):
    return torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 64))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def captured(width=256):
    return autoshard.capture(network(width), INPUTS, loss_fn=torch.nn.functional.mse_loss, optimizer=sgd)


@pytest.fixture(scope="module")
def program():
    return captured()


@pytest.fixture(scope="module")
def plan(program):
    return autoshard.plan_program(program, autoshard.Mesh((2, 2), device="h100"))


def test_every_alternative_is_the_plan_that_a_hint_gives(program, plan):
    found = autoshard.explain(plan, "0.weight")
    assert found.chosen == plan.parameters["0.weight"].spec
    assert len(found.alternatives) == len({each.spec for each in found.alternatives}) == 11
    for each in found.alternatives:
        hinted = autoshard.plan_program(program, plan.mesh, hints={"0.weight": each.spec})
        assert each.step_time_s == pytest.approx(hinted.predicted.step_time_s)
        assert each.peak_memory_bytes == hinted.predicted.peak_memory_bytes
        differ = [name for name in plan.parameters if plan.parameters[name].spec != hinted.parameters[name].spec]
        assert set(each.changed) >= set(differ) - {"0.weight"}


def test_the_chosen_sharding_is_the_plans_own_and_none_is_better(plan):
    found = autoshard.explain(plan, "2.weight")
    (chosen,) = [each for each in found.alternatives if each.spec == found.chosen]
    assert chosen.step_time_s == plan.predicted.step_time_s
    assert chosen.changed == ()
    times = [each.step_time_s for each in found.alternatives]
    assert times == sorted(times)
    assert plan.solver.status == "optimal"


def test_a_hint_for_the_tensor_itself_does_not_hide_what_it_costs(program, plan):
    hinted = autoshard.plan_program(program, plan.mesh, hints={"0.weight": "[],[]", "2.weight": "[],[]"})
    found = autoshard.explain(hinted, "0.weight")
    assert found.chosen == ((), ())
    assert len(found.alternatives) == 11
    best = found.alternatives[0]
    assert best.step_time_s <= hinted.predicted.step_time_s
    assert "2.weight" not in best.changed  # the other hint is kept


def test_values_inside_the_program_are_named_by_module_or_op(program, plan):
    by_module = autoshard.explain(plan, "1")
    number = next(op.index for op in program.ops if op.module == "1" and op.phase == "forward")
    assert by_module.type.shape == (32, 256)
    assert autoshard.explain(plan, f"op{number}").alternatives == by_module.alternatives
    assert len(by_module.alternatives) > 2


def test_several_tensors_are_fixed_alike(plan):
    alike = autoshard.explain(plan, "0.*eight")
    assert alike.alternatives == autoshard.explain(plan, "0.weight").alternatives
    with pytest.raises(PlanError, match="fits tensors of 2 shapes"):
        autoshard.explain(plan, "*.weight")


def test_what_there_is_no_plan_for_says_why(program):
    mesh = autoshard.Mesh((2, 2), device="h100")
    # Bytes per device: 255 kB are enough for a plan, with a whole weight and its momentum none takes less than 293 kB.
    tight = autoshard.plan_program(program, mesh, memory=260_000)
    found = autoshard.explain(tight, "0.weight")
    for each in found.alternatives:
        assert (each.step_time_s is None) == bool(each.error)
        assert each.peak_memory_bytes is None or each.peak_memory_bytes <= tight.options.memory
    (whole,) = [each for each in found.alternatives if each.spec == ((), ())]
    assert whole.error.startswith(("needs at least ", "no plan was found"))
    assert whole.error in str(found)


def test_a_plan_from_a_file_wants_its_program(program, plan):
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    with pytest.raises(PlanError, match=r"pass its program, autoshard\.capture"):
        autoshard.explain(loaded, "0.weight")
    with pytest.raises(PlanMismatchError):
        autoshard.explain(loaded, "0.weight", captured(128))
    assert autoshard.explain(loaded, "0.bias", program) == autoshard.explain(plan, "0.bias")


def test_an_unknown_tensor_is_refused_with_near_names(plan):
    with pytest.raises(PlanError, match=r"no tensor called '0\.weigth'; did you mean 0\.weight"):
        autoshard.explain(plan, "0.weigth")
    with pytest.raises(PlanError, match="op12 is the result of aten op 12"):
        autoshard.explain(plan, "zzz")


def test_differences_are_said_for_a_person(plan):
    def other(spec, seconds):
        return Alternative(spec, seconds, seconds, 0.0, seconds, 10)

    chosen, worse, equal = other(((), ()), 1.0), other((("data",), ()), 1.5), other((("model",), ()), 1.0 + 1e-9)
    kind = autoshard.explain(plan, "0.weight").type
    found = Explanation("w", kind, ((), ()), (chosen, worse, equal), plan.mesh)
    assert (found.more(chosen), found.more(worse), found.more(equal)) == ("", "+500 ms (+50 %)", "equal")
    names = Alternative((), changed=("h.0.w", "h.1.w", "h.0.b", "x", "y")).changes()
    assert names == "h.*.w, h.*.b, x and 1 more"
