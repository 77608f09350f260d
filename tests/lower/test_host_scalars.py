"""Numbers that optimizers work out on the host, followed from step to step: against captures of those very steps."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import autoshard
from autoshard.errors import LoweringError
from autoshard.frontends.tracing import optimizer as capturing
from autoshard.lower.host_scalars import HostScalars, small_twin
from autoshard.lower.to_jax import optimizer_scalars
from autoshard.lower.torch_xla.first_steps import FirstSteps
from autoshard.stablehlo.reader import build_graph


class Both(torch.optim.Optimizer):
    """Two optimizers that step together, and share groups and state with it: of a GAN, say."""

    def __init__(self, first, second):
        self.first, self.second = first, second
        super().__init__(first.param_groups + second.param_groups, {})
        first.state = second.state = self.state
        self.param_groups = first.param_groups + second.param_groups

    def step(self, closure=None):
        self.first.step()
        self.second.step()


def both(ps):
    ps = list(ps)
    return Both(torch.optim.Adam(ps[:2], lr=1e-3), torch.optim.SGD(ps[2:], lr=0.05, momentum=0.5))


OPTIMIZERS = {
    "both": both,
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, betas=(0.8, 0.95)),
    "adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-3, amsgrad=True, weight_decay=0.02),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-3, lr_decay=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5),
}


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def program(optimizer):
    x = torch.zeros(2, 4)
    return autoshard.capture(net(), (x, x), loss_fn=torch.nn.functional.mse_loss, optimizer=optimizer)


def scalars(optimizer, captured, steps):
    """Values of the `steps`-th step of a new optimizer."""
    followed = HostScalars(captured, optimizer(net().parameters()), optimizer_scalars(build_graph(captured)))
    for _ in range(steps):
        values = followed.next_step()
    return values


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "nadam"])
def test_values_are_those_of_a_capture_of_that_step(name, monkeypatch):
    captured = program(OPTIMIZERS[name])
    monkeypatch.setattr(capturing, "STEADY_STEP", 3.0)
    wanted = program(OPTIMIZERS[name]).values
    found = scalars(OPTIMIZERS[name], captured, 4)
    assert found.keys() == wanted.keys()
    for scalar, value in wanted.items():
        torch.testing.assert_close(found[scalar], value, rtol=1e-6, atol=0)


def test_numbers_that_are_one_in_the_arguments_type_are_followed_as_one():
    """RMSprop with an epsilon of 0.01: 1 - 0.99 is a little more, and the same in f32."""

    def optimizer(parameters):
        return torch.optim.RMSprop(parameters, alpha=0.99, eps=0.01)

    captured = program(optimizer)
    values = scalars(optimizer, captured, 3)
    assert any(torch.equal(value, torch.tensor(0.01, dtype=value.dtype)) for value in values.values())
    assert values.keys() == captured.values.keys()


def test_a_state_on_the_host_advances_with_the_steps():
    captured = program(OPTIMIZERS["nadam"])
    varying = optimizer_scalars(build_graph(captured))
    model = net()
    optimizer = OPTIMIZERS["nadam"](model.parameters())
    followed = HostScalars(captured, optimizer, varying)
    first, second = followed.next_step(), followed.next_step()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    resumed = HostScalars(captured, optimizer, varying)
    assert any(first[name] != second[name] for name in varying)
    assert resumed.next_step() == second


def test_a_schedule_is_followed():
    captured = program(OPTIMIZERS["sgd"])
    optimizer = OPTIMIZERS["sgd"](net().parameters())
    followed = HostScalars(captured, optimizer, optimizer_scalars(build_graph(captured)))
    before = followed.next_step()
    optimizer.param_groups[0]["lr"] = 0.05
    after = followed.next_step()
    changed = [name for name in before if before[name] != after[name]]
    assert [round(float(before[name] / after[name]), 5) for name in changed] == [2.0]


def test_two_numbers_that_were_one_are_refused():
    def twice(ps):
        return torch.optim.SGD(ps, lr=0.5, momentum=0.1, weight_decay=0.1)

    captured = program(twice)
    optimizer = twice(net().parameters())
    followed = HostScalars(captured, optimizer, optimizer_scalars(build_graph(captured)))
    followed.next_step()
    optimizer.param_groups[0]["momentum"] = 0.2
    with pytest.raises(LoweringError, match=r"stands for 0\.1 and 0\.2 now: two settings of SGD were equal"):
        followed.next_step()


def test_a_first_step_that_is_another_program_is_refused():
    def radam(ps):
        return torch.optim.RAdam(ps, lr=1e-3)

    captured = program(radam)
    followed = HostScalars(captured, radam(net().parameters()), optimizer_scalars(build_graph(captured)))
    with pytest.raises(LoweringError, match="step 1 of RAdam is not the captured program"):
        followed.next_step()


def test_hooks_on_the_steps_of_all_optimizers_do_not_hear_of_a_twins():
    """Such hooks end a planned step (`auto/policy.py`): a twin's would have ended it before the optimizer's own."""
    used, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    used.grad = torch.ones(3)
    optimizer = torch.optim.RAdam([used, unused])
    heard = []
    hook = register_optimizer_step_post_hook(lambda *_: heard.append(True))
    try:
        assert FirstSteps(optimizer).has_one_to_take(optimizer)
        assert heard == []
    finally:
        hook.remove()
    for step in range(7):
        assert FirstSteps(optimizer).has_one_to_take(optimizer) == (step < 5)
        optimizer.step()


def test_an_optimizer_with_parameters_that_are_not_used_has_no_first_steps():
    used, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    used.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([used, unused])
    optimizer.step()
    assert not FirstSteps(optimizer).has_one_to_take(optimizer)


def small_step(model, optimizer):
    return autoshard.capture(
        model, torch.zeros(4, 8), loss_fn=lambda out: out.square().mean(), optimizer=optimizer, frontend="torchax"
    )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_numbers_that_follow_from_shapes_are_found():
    """Muon's steps are longer by the root of a matrix's rows over its columns."""
    pytest.importorskip("jax")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 8, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    captured = small_step(model, optimizer)
    followed = HostScalars(captured, optimizer, optimizer_scalars(build_graph(captured)))
    optimizer.param_groups[0]["lr"] = 0.02
    values = [round(float(value), 5) for value in followed.next_step().values()]
    assert -0.04 in values
    assert -0.02 in values


def test_a_parameter_without_gradients_does_not_make_other_steps():
    model = torch.nn.Linear(8, 8)
    model.unused = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    captured = small_step(model, optimizer)
    followed = HostScalars(captured, optimizer, optimizer_scalars(build_graph(captured)))
    followed.next_step()


def test_a_twin_of_a_class_with_arguments_has_the_state_of_each_parameter():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters, needed):
            super().__init__(parameters, {"needed": needed})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(self.state[p]["sum"], alpha=self.param_groups[0]["needed"])

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = Own(model.parameters(), 0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.warns(UserWarning, match="Own cannot be made of parameters alone .*missing 1 required.*'needed'"):
        twin = small_twin(optimizer, fresh=True)
    assert {p.dim(): state["sum"].dim() for p, state in twin.state.items()} == {1: 1, 2: 2}


class GroupCounts(torch.optim.Optimizer):
    """Counts steps in a tensor of its group, as timm's LAMB does, and keeps sums per row of large matrices alone."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.tensor(0.0)
            group["step"].add_(1)
            scale = group["lr"] / (1 - 0.9 ** group["step"].item())
            for p in group["params"]:
                by_rows = p.dim() == 2 and min(p.shape) > 1
                if "rows" not in self.state[p]:
                    self.state[p]["rows"] = torch.zeros_like(p[:, 0]) if by_rows else None
                assert (self.state[p]["rows"] is not None) == by_rows
                if by_rows:
                    self.state[p]["rows"].add_(p.grad.square().mean(1))
                p.add_(p.grad, alpha=-scale)


@pytest.mark.parametrize("begun", [0, 2])
def test_counts_in_groups_are_followed_and_left_alone(begun):
    model = net()
    optimizer = GroupCounts(model.parameters())
    for _ in range(begun):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    captured = program(lambda parameters: GroupCounts(parameters))
    followed = HostScalars(captured, optimizer, optimizer_scalars(build_graph(captured)))
    found = [followed.next_step() for _ in range(3)]
    for number, values in enumerate(found, begun + 1):
        scale = 0.1 / (1 - 0.9**number)
        assert any(abs(abs(float(value)) - scale) < 1e-6 for value in values.values() if not value.dim())
    assert [group.get("step", 0) for group in optimizer.param_groups] == [begun]
    followed.restore(optimizer)
    assert optimizer.param_groups[0]["step"] == begun + 3
