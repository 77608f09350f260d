"""A captured program: what its arguments, results and ops are, and that capturing leaves everything as it was."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.frontends.torch_xla.program import XlaLabels, capture
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.program import Program
from autoshard.stablehlo.reader import build_graph
from tests.frontends.models import Mlp, locations, mean_square, sample

PARAMETERS = ["first.weight", "first.bias", "norm.weight", "norm.bias", "second.weight", "second.bias"]


def on_meta(**settings: Any) -> Mlp:
    with torch.device("meta"):
        return Mlp(**settings)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def radam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RAdam(parameters, lr=1e-3)


@pytest.fixture(scope="module")
def adamw_step() -> Program:
    return capture(on_meta(), sample(), loss_fn=mean_square, optimizer=adamw)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (plain, ()),
        (momentum, ("momentum_buffer",)),
        (adamw, ("exp_avg", "exp_avg_sq")),
        (foreach, ("exp_avg", "exp_avg_sq")),
        (radam, ("exp_avg", "exp_avg_sq")),
    ],
)
def test_arguments_and_results_have_roles_and_names(
    optimizer: Callable[[Any], torch.optim.Optimizer], state: tuple[str, ...]
) -> None:
    program = capture(on_meta(), sample(), loss_fn=mean_square, optimizer=optimizer)
    names: dict[str, set[str]] = {}
    for argument in program.arguments:
        names.setdefault(argument.role, set()).add(argument.name)
    states = {f"{p}.{key}" for p in PARAMETERS for key in state}
    assert names.get("optimizer_state", set()) == states
    # Without weight decay, SGD reads a parameter only to update it: all of them are arguments all the same.
    assert names["parameter"] == set(PARAMETERS)
    assert names["buffer"] == {"steps"}
    assert names["input"] == {"x", "target"}
    assert {a.of for a in program.arguments if a.role == "optimizer_state"} == (set(PARAMETERS) if state else set())
    assert program.outputs[0].role == "loss"
    assert program.outputs[0].updates is None
    assert program.outputs[0].type.shape == ()
    updated = {o.name for o in program.outputs[1:]}
    assert updated == set(PARAMETERS) | {"steps"} | states
    for output in program.outputs[1:]:
        assert output.updates is not None
        argument = program.arguments[output.updates]
        assert (argument.name, argument.role, argument.type) == (output.name, output.role, output.type)


def test_an_optimizer_over_the_model_is_as_good_as_a_callable(adamw_step: Program) -> None:
    model = on_meta()
    program = capture(model, sample(), loss_fn=mean_square, optimizer=adamw(model.parameters()))
    assert program.fingerprint == adamw_step.fingerprint


def test_the_same_program_twice_and_with_weights(adamw_step: Program) -> None:
    again = capture(on_meta(), sample(), loss_fn=mean_square, optimizer=adamw)
    weights = capture(Mlp(), tuple(t.new_empty(t.shape, device="cpu") for t in sample()), loss_fn=mean_square,
                      optimizer=adamw)  # fmt: skip
    assert again == adamw_step or again.fingerprint == adamw_step.fingerprint
    assert again.arguments == weights.arguments == adamw_step.arguments
    assert again.ops == weights.ops == adamw_step.ops
    assert again.fingerprint == weights.fingerprint == adamw_step.fingerprint


def test_another_shape_is_another_program(adamw_step: Program) -> None:
    other = capture(on_meta(width=8), sample(8), loss_fn=mean_square, optimizer=adamw)
    assert other.fingerprint != adamw_step.fingerprint


class Softmax(nn.Module):
    """Differs from another by a dimension number, or by a float, and in nothing else."""

    def __init__(self, dim: int, scale: float = 1.5) -> None:
        super().__init__()
        self.dim, self.scale = dim, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * self.scale, self.dim).transpose(0, 1)


def test_another_dimension_number_is_another_program() -> None:
    """Also for the plan's own comparison; floats may change from step to step."""
    x = torch.zeros(8, 8)
    rows, columns, scaled = (capture(Softmax(*each), x) for each in ((1,), (0,), (1, 2.5)))
    softmax, turned = (next(op for op in rows.ops if name in op.name) for name in ("softmax", "transpose"))
    assert (softmax.options, turned.options) == ("dim=1, half_to_float=False", "dim0=0, dim1=1")
    assert rows.fingerprint == scaled.fingerprint != columns.fingerprint
    plan = autoshard.plan_program(rows, Mesh((2,)))
    plan.check_program(scaled)
    said = r"op \d \(aten._softmax.default\) is called with dim=0, .*, the plan has dim=1, "
    with pytest.raises(autoshard.PlanError, match=said):
        plan.check_program(columns)
    assert autoshard.Plan.from_json(plan.to_json()) == plan


def test_tied_weights_are_one_argument_under_the_first_name() -> None:
    program = capture(on_meta(tied=True), sample(), loss_fn=mean_square, optimizer=adamw)
    names = [a.name for a in program.arguments]
    assert "first.weight" in names
    assert "second.weight" not in names
    assert names.count("first.weight.exp_avg") == 1


def test_forward_only() -> None:
    program = capture(on_meta(), sample()[0])
    assert program.kind == "forward"
    assert {op.phase for op in program.ops} == {"forward"}
    assert [(o.name, o.role, o.type.shape) for o in program.outputs] == [
        ("output", "output", (4, 6, 16)),
        ("steps", "buffer", (16,)),
    ]


def test_outputs_are_named_after_their_place() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"same": x, "parts": (x + 1, x.sum())}

    program = capture(Two(), torch.empty(2, 3))
    assert [(o.name, o.type.shape) for o in program.outputs] == [
        ("same", (2, 3)), ("parts.0", (2, 3)), ("parts.1", ()),
    ]  # fmt: skip


def test_without_an_optimizer_the_gradients_are_results() -> None:
    program = capture(on_meta(), sample(), loss_fn=mean_square)
    grads = {o.name for o in program.outputs if o.role == "output"}
    assert grads == {f"{name}.grad" for name in PARAMETERS}


def test_a_frozen_parameter_is_read_and_kept() -> None:
    model = on_meta()
    model.first.weight.requires_grad_(False)
    program = capture(model, sample(), loss_fn=mean_square, optimizer=momentum)
    assert "first.weight" in {a.name for a in program.arguments}
    assert "first.weight" not in {o.name for o in program.outputs}
    assert "first.weight.momentum_buffer" not in {a.name for a in program.arguments}


def test_every_op_is_labelled_and_every_float_output_is_known(adamw_step: Program) -> None:
    found = locations(adamw_step.stablehlo)
    # An in-place update repeats the mark of what it replaces, without a label; it computes nothing.
    computing = [where for kind, where, target in found if kind != "stablehlo.constant" and target != "Sharding"]
    labelled = [where for where in computing if re.search(r'"op\d+[./]', where)]
    assert len(computing) > 100
    assert len(labelled) >= 0.99 * len(computing)
    marked = {m.group(0) for _, where, target in found if target == "Sharding"
              for m in [re.search(r"op\d+\.out\d+", where)] if m}  # fmt: skip
    expected = {
        (op.index, j)
        for op in adamw_step.ops
        for j, type_ in enumerate(op.outputs)
        if type_.dtype.startswith(("f", "bf"))
    }
    assert marked
    assert marked <= {f"op{k}.out{j}" for k, j in expected if k not in adamw_step.unmarked}
    # What no result depends on is not in the module (the gradient of an input, say).
    known = set(build_graph(adamw_step).aten_outputs)
    assert known <= expected
    assert len(known) >= 0.95 * len(expected)


def test_outputs_without_markers_are_those_that_would_be_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops that torch_xla writes with scalars of their own, products by one, and several to an op among them."""

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        half = out.bfloat16()
        shifted = torch.add(out, half, alpha=2) - 1 * torch.sub(out, target.mean(), alpha=0.5)
        return (shifted / 3 + half * 1 + torch.lerp(out, -out, 0.3).exp().rsqrt().tanh()).mean()

    def graph() -> Graph:
        return build_graph(capture(on_meta(), sample(), loss_fn=loss, optimizer=torch.optim.AdamW))

    bare = graph()
    for known in (Program, XlaLabels):
        monkeypatch.setattr(sys.modules[known.__module__], "WRITTEN_LAST", frozenset())
    marked = graph()
    assert len(bare.program.stablehlo) < 0.8 * len(marked.program.stablehlo)
    assert repr(bare.ops) == repr(marked.ops)  # a NaN is not equal to itself
    assert list(bare.aten_outputs.items()) == list(marked.aten_outputs.items())


def test_module_paths_forward_and_backward(adamw_step: Program) -> None:
    for phase in ("forward", "backward"):
        assert {"first", "norm", "second"} <= {op.module for op in adamw_step.ops if op.phase == phase}
    dots = [(op.phase, op.module) for op in adamw_step.ops if op.name == "autoshard.einsum.default"]
    assert Counter(dots) == {
        ("forward", "first"): 1, ("forward", "second"): 1, ("backward", "second"): 2, ("backward", "first"): 1,
    }  # fmt: skip
    assert {op.phase for op in adamw_step.ops} == {"forward", "backward", "optimizer"}


def test_producers_name_arguments_and_ops(adamw_step: Program) -> None:
    first = next(op for op in adamw_step.ops if op.name == "autoshard.einsum.default")
    assert first.inputs == ("x", "first.weight")
    for op in adamw_step.ops:
        for maker in op.inputs:
            if isinstance(maker, tuple):
                assert maker[0] < op.index
                assert maker[1] < len(adamw_step.ops[maker[0]].outputs)
            elif maker is not None:
                assert maker in {a.name for a in adamw_step.arguments}


@pytest.mark.parametrize("fails", [False, True])
def test_model_and_optimizer_are_left_as_they_were(fails: bool) -> None:
    model = Mlp()
    optimizer = adamw(model.parameters())
    mean_square(model(torch.ones(2, 3, 16)), torch.zeros(2, 3, 16)).backward()
    optimizer.step()
    tensors = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    states = {(p, key): (t, t.clone()) for p, s in optimizer.state.items() for key, t in s.items()}
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    random = torch.get_rng_state()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fails:
            raise KeyError("broken")
        return mean_square(output, target)

    if fails:
        with pytest.raises(ValueError, match="KeyError: 'broken'"):
            capture(model, sample(), loss_fn=loss_fn, optimizer=optimizer)
    else:
        capture(model, sample(), loss_fn=loss_fn, optimizer=optimizer)

    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == attributes
    for name, t in model.state_dict(keep_vars=True).items():
        assert t is tensors[name][0]
        assert torch.equal(t, tensors[name][1])
    for name, p in model.named_parameters():
        assert p.grad is grads[name][0]
        assert torch.equal(p.grad, grads[name][1])
    assert {(p, key) for p, s in optimizer.state.items() for key in s} == set(states)
    for (p, key), (t, value) in states.items():
        assert optimizer.state[p][key] is t
        assert torch.equal(t, value)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_loss_module_has_its_own_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return mean_square(output, target) * self.scale

    program = capture(on_meta(), sample(), loss_fn=Scaled(), optimizer=momentum)
    assert "loss_fn.scale" in {a.name for a in program.arguments if a.role == "parameter"}
    assert "loss_fn.scale.momentum_buffer" in {a.name for a in program.arguments}


def test_batch_norm_updates_its_running_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    program = capture(model, torch.empty(2, 3, 8, 8), loss_fn=lambda out: out.mean(), optimizer=momentum)
    updated = {o.name for o in program.outputs if o.role == "buffer"}
    assert updated == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_a_program_names_no_file_of_the_machine_it_was_captured_on(adamw_step: Program) -> None:
    assert b"op0." in adamw_step.stablehlo
    assert b".py" not in adamw_step.stablehlo


def test_copies_of_arguments_are_captured() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.register_buffer("shift", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone() @ self.weight.clone() + self.shift.clone() + self.weight.data.clone()[0]

    program = capture(Copies(), torch.zeros(4, 8))
    assert [op.name for op in program.ops].count("aten.clone.default") == 4
    assert {a.name for a in program.arguments} == {"weight", "shift", "x"}


def test_a_wrapper_of_any_arguments_leaves_the_loss_what_it_needs() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 2)

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.inner(*args, **kwargs)

    program = capture(Wrapper(), (torch.empty(3, 4), torch.empty(3, 2)), loss_fn=torch.nn.functional.mse_loss)
    assert [each.type.shape for each in program.arguments if each.role == "input"] == [(3, 2), (3, 4)]


class Masked(nn.Linear):
    """Takes a mask that it can do without, as timm's vision transformers do."""

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x)
        return out if attn_mask is None else out * attn_mask[:, :, None].prod(1)


@pytest.mark.parametrize("mask", [(), (torch.ones(3, 5),)], ids=["without", "with"])
def test_the_loss_gets_what_it_requires_before_the_model_what_it_can_do_without(mask: tuple[torch.Tensor, ...]) -> None:
    program = capture(Masked(4, 2), (torch.ones(3, 4), *mask, torch.ones(3, 2)), loss_fn=torch.nn.functional.mse_loss)
    assert program.inputs == ("x", *(["attn_mask"] if mask else []), "target")


class Recorder(nn.Module):
    """Registers a hook in its first run, as transformers' models do, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.kept: list[torch.Tensor] = []
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "hooked", False):
            self.layer.register_forward_hook(lambda module, args, output: self.kept.append(output))
            self.hooked = True
        self.seen["x"] = x
        self.kept.clear()
        self.layer(x)
        return torch.stack(self.kept).sum(0)


@pytest.mark.parametrize("ran_before", [True, False])
def test_what_a_forward_pass_registers_and_keeps_goes_with_its_capture(ran_before: bool) -> None:
    """SegFormer's hidden states had come twice after a capture: hooks had stayed, not what says that they are there."""
    model = Recorder()
    x = torch.ones(4, 16)
    before = model(x) if ran_before else None
    kept = list(model.kept)
    capture(model, (x,), loss_fn=lambda out: out.mean(), optimizer=plain)
    assert list(model.kept) == kept
    assert list(model.seen) == (["x"] if ran_before else [])
    assert len(model.layer._forward_hooks) == ran_before
    after = model(x)
    assert len(model.kept) == 1
    torch.testing.assert_close(after, before if ran_before else model.layer(x))
