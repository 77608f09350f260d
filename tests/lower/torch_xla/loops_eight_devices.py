"""What `tests/auto/test_loops.py` asserts on: everyday training loops, under the automatic mode and in plain PyTorch.

Each loop is a function of a model and of what moves a batch to the model's device; it returns its losses.

python -m tests.lower.torch_xla.loops_eight_devices OUT.json [LOOP …]
"""

import copy
import os
import warnings

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

import torch
import torch.nn.functional as F  # noqa: N812
import torch_xla
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.auto import policy as auto
from autoshard.errors import AutoShardingWarning
from tests.lower.torch_xla import scenarios
from tests.lower.torch_xla.annotations_traced import lacking

ROWS, STEPS = 16, 4
LOOPS = {}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 128)
        self.down = torch.nn.Linear(128, 32)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Varied(Net):
    """Takes its inputs as `*args`, which have no names."""

    def forward(self, *inputs):
        return super().forward(*inputs)


class ByValue(Net):
    """How large a part of it is follows from values: it cannot be captured."""

    def forward(self, x):
        kept = x[x.sum(-1) > 0]
        return super().forward(x) + super().forward(kept).sum() * 0.01


class Fails(Net):
    """An error of the loop's own code."""

    def forward(self, x):
        if bool((x > 50).any()):
            raise ValueError("a sample is out of range")
        return super().forward(x)


class Remembers(Net):
    """Reads what it left in an attribute."""

    last = None

    def forward(self, x):
        h = super().forward(x) + (0 if self.last is None else self.last)
        self.last = h.detach().mean(0)
        return h


class Counts(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class Averages(Net):
    """Reads how many batches its normalization has seen."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(32, momentum=None)

    def forward(self, x):
        return super().forward(self.norm(x))


def loop(of=Net):
    def register(function):
        LOOPS[function.__name__] = (function, of)
        return function

    return register


def batches(steps=STEPS, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, rows, 32, generator=generator)) for _ in range(steps)]


def sgd(model, lr=0.05, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **options)


def sync(tensor):
    if tensor.device.type == "xla":
        torch_xla.sync()


LACKING = []
"""Of each step after the first: how many of the plan's annotations it has not."""


def count(model, loss):
    if (plan := auto.current_plan()) is not None and loss.device.type == "xla":
        LACKING.append(lacking(plan, [loss.detach(), *model.parameters()]))


def plain(model, to, *, optimizer=None, between=None, before=None, after=None, loss_of=F.mse_loss, data=None):
    """The ordinary loop, with something added at one place."""
    optimizer = optimizer or sgd(model)
    losses = []
    for number, (x, y) in enumerate(data or batches()):
        x, y = to(x), to(y)
        out = model(x)
        loss = loss_of(out, y)
        if before is not None:
            before(out, y, loss)
        loss.backward()
        if between is not None:
            between(number, loss)
        optimizer.step()
        count(model, loss)
        if after is not None:
            after(number)
        optimizer.zero_grad()
        sync(loss)
        losses.append(loss.item())
    return losses


@loop()
def running_loss(model, to):
    total = []

    def between(number, loss):
        total.append(total[-1] + loss.detach() if total else loss.detach())

    losses = plain(model, to, between=between)
    return [*losses, total[-1].item()]


@loop()
def running_loss_in_place(model, to):
    total = to(torch.zeros(()))
    losses = plain(model, to, before=lambda out, y, loss: total.add_(loss.detach()))
    return [*losses, total.item()]


@loop()
def checked_for_nan(model, to):
    optimizer = sgd(model)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.mse_loss(model(to(x * torch.inf if number in (1, 4) else x)), to(y))
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
        sync(loss)
    return losses


@loop()
def first_step_skipped(model, to):
    optimizer = sgd(model)
    losses = []
    for number, (x, y) in enumerate(batches()):
        loss = F.mse_loss(model(to(x)), to(y))
        if number:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def clipped_by_norm(model, to):
    norms = []
    losses = plain(
        model, to, between=lambda n, loss: norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    )
    return losses + [float(norm) for norm in norms]


@loop()
def clipped_by_value(model, to):
    return plain(model, to, between=lambda n, loss: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3))


@loop()
def clipped_by_hand(model, to):
    def between(number, loss):
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad = p.grad * (0.1 / (norm + 1e-6)).clamp(max=1.0)

    return plain(model, to, between=between)


@loop()
def gradient_norm_at_times(model, to):
    norms = []

    def between(number, loss):
        if number % 2 == 0:
            norms.append(sum(p.grad.square().sum() for p in model.parameters()).sqrt().item())

    return plain(model, to, between=between) + norms


@loop()
def gradients_centred_and_decayed(model, to):
    def between(number, loss):
        with torch.no_grad():
            for p in model.parameters():
                p.grad.sub_(p.grad.mean())
                p.grad.add_(p, alpha=1e-2)

    return plain(model, to, between=between)


@loop()
def accumulated(model, to):
    optimizer = sgd(model)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.mse_loss(model(to(x)), to(y)) / 2
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def accumulated_later(model, to):
    """One pass in the first step, two in the others."""
    optimizer = sgd(model)
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        loss = F.mse_loss(model(to(x)), to(y))
        loss.backward()
        if number in (0, 2, 4):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def two_optimizers(model, to):
    first = torch.optim.SGD(model.up.parameters(), lr=0.05, momentum=0.9)
    second = torch.optim.Adam(model.down.parameters(), lr=1e-3)

    def after(number):
        second.step()
        second.zero_grad()

    return plain(model, to, optimizer=first, after=after)


@loop()
def scheduled(model, to):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    return plain(model, to, optimizer=optimizer, after=lambda number: schedule.step())


@loop()
def scaled(model, to):
    """As GradScaler does: the loss is scaled, gradients are unscaled, and a step with an infinite one is left out."""
    optimizer = sgd(model)
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        loss = F.mse_loss(model(to(x)), to(y))
        (loss * (1e38 if number == 2 else 1024.0) * (1e6 if number == 2 else 1.0)).backward()
        found = sum(p.grad.isinf().sum() + p.grad.isnan().sum() for p in model.parameters())
        for p in model.parameters():
            p.grad.div_(1024.0)
        if found.item() == 0:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def accuracy_logged(model, to):
    right = to(torch.zeros((), dtype=torch.int64))

    def before(out, y, loss):
        right.add_((out.argmax(-1) == y.argmax(-1)).sum())

    losses = plain(model, to, before=before, loss_of=lambda out, y: F.cross_entropy(out, y.argmax(-1)))
    return [*losses, right.item()]


@loop()
def metrics_between(model, to):
    seen = []

    def between(number, loss):
        with torch.no_grad():
            seen.append(model(to(torch.ones(4, 32))).abs().mean())
            seen.append(torch.exp(loss))

    return plain(model, to, between=between) + [float(each) for each in seen]


@loop()
def read_before(model, to):
    seen = []
    return plain(model, to, before=lambda out, y, loss: seen.append(loss.item())) + seen


@loop()
def validated(model, to):
    seen = []

    def after(number):
        if number % 2 == 0:
            model.eval()
            with torch.no_grad():
                seen.append(F.mse_loss(model(to(torch.ones(8, 32))), to(torch.zeros(8, 32))).item())
            model.train()

    return plain(model, to, after=after) + seen


@loop()
def last_batch_smaller(model, to):
    data = batches(2) + batches(1, rows=5) + batches(2)
    return plain(model, to, data=data)


@loop()
def gradient_penalty(model, to):
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        x = to(x).requires_grad_()
        loss = F.mse_loss(model(x), to(y))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def averaged(model, to):
    """A teacher follows the weights: `lerp_` and `copy_`."""
    teacher = copy.deepcopy(model)
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        x, y = to(x), to(y)
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.mse_loss(model(x), y) + 0.1 * F.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            teacher.down.bias.copy_(model.down.bias)
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def frozen_for_a_while(model, to):
    def after(number):
        model.up.requires_grad_(number != 1)

    return plain(model, to, after=after, data=batches(5))


@loop()
def frozen_at_first(model, to):
    model.up.requires_grad_(False)
    return plain(model, to, after=lambda number: model.up.requires_grad_(number >= 1))


@loop()
def closure(model, to):
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        x, y = to(x), to(y)

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(again)
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def gradients_kept_as_zeros(model, to):
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(to(x)), to(y))
        loss.backward()
        optimizer.step()
        count(model, loss)
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def cleared_behind_the_pass(model, to):
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        loss = F.mse_loss(model(to(x)), to(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def never_cleared(model, to):
    optimizer = sgd(model, lr=1e-3)
    losses = []
    for x, y in batches():
        loss = F.mse_loss(model(to(x)), to(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def two_backward_passes(model, to):
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        out = model(to(x))
        first, second = F.mse_loss(out, to(y)), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(first.item())
        sync(first)
    return losses


@loop()
def two_views(model, to):
    """One loss of two passes."""
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        loss = F.mse_loss(model(to(x)), to(y)) - F.cosine_similarity(model(to(x)), model(to(y))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def adversaries(model, to):
    torch.manual_seed(2)
    judge = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    judge = judge.to(next(model.parameters()).device)
    makes, judges = sgd(model), sgd(judge)
    losses = []
    for x, y in batches():
        made = model(to(x))
        seen = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(to(y))).mean()
        seen.backward()
        judges.step()
        judges.zero_grad()
        loss = F.softplus(-judge(made)).mean()
        loss.backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        losses += [loss.item(), seen.item()]
        sync(loss)
    return losses


@loop()
def another_optimizer_later(model, to):
    return plain(model, to) + plain(model, to, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


@loop()
def weights_loaded_between(model, to):
    kept = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}

    def after(number):
        if number == 1:
            model.load_state_dict(kept)

    return plain(model, to, after=after)


@loop()
def weights_bounded_before(model, to):
    def between(number, loss):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.05, 0.05)

    return plain(model, to, between=between)


@loop()
def output_edited(model, to):
    def loss_of(out, y):
        out = out * 1.0
        out[:, :4] = 0.0
        return F.mse_loss(out, y)

    return plain(model, to, loss_of=loss_of)


@loop()
def modes_around_the_pass(model, to):
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        with torch.device("cpu"), FlopCounterMode(display=False):
            out = model(to(x))
        loss = F.mse_loss(out, to(y))
        with FlopCounterMode(display=False):
            loss.backward()
        with torch.device("cpu"):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def updated_by_hand(model, to):
    losses = []
    for x, y in batches(12):
        loss = F.mse_loss(model(to(x)), to(y))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= 0.05 * g
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def sharpness_aware(model, to):
    """Two passes to a step, the second at moved weights."""
    optimizer = sgd(model)
    losses = []
    for x, y in batches():
        x, y = to(x), to(y)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            moved = [p.grad * 0.01 for p in model.parameters()]
            for p, m in zip(model.parameters(), moved, strict=True):
                p.add_(m)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, m in zip(model.parameters(), moved, strict=True):
                p.sub_(m)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    return losses


@loop()
def rectified(model, to):
    """An optimizer whose first steps are others, with clipping."""
    return plain(
        model,
        to,
        optimizer=torch.optim.RAdam(model.parameters(), lr=1e-3),
        between=lambda n, loss: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        data=batches(8),
    )


@loop(Varied)
def inputs_without_names(model, to):
    return plain(model, to)


@loop(ByValue)
def not_captured(model, to):
    return plain(model, to)


@loop(Fails)
def errors_caught(model, to):
    """An error of the model's own ends a pass, and the loop goes on."""
    optimizer = sgd(model)
    losses, said = [], []
    for number, (x, y) in enumerate(batches(6)):
        try:
            loss = F.mse_loss(model(to(x + 100.0 if number in (0, 3) else x)), to(y))
        except ValueError as error:
            said.append(str(error))
            continue
        loss.backward()
        try:
            loss + torch.ones(3, 5, device=loss.device) @ torch.ones(4, device=loss.device)
        except RuntimeError as error:
            said.append("size" in str(error) or str(error))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
    assert said == ["a sample is out of range", True, True, "a sample is out of range", True, True], said
    return losses


@loop()
def layer_replaced(model, to):
    optimizers, losses = [sgd(model)], []
    for number, (x, y) in enumerate(batches(5)):
        loss = F.mse_loss(model(to(x)), to(y))
        loss.backward()
        optimizers[-1].step()
        optimizers[-1].zero_grad()
        losses.append(loss.item())
        sync(loss)
        if number == 1:
            torch.manual_seed(3)
            model.down = torch.nn.Linear(128, 32).to(loss.device)
            optimizers.append(sgd(model))
    return losses


@loop()
def group_added(model, to):
    optimizer = torch.optim.SGD(model.up.parameters(), lr=0.05)

    def after(number):
        if number == 1:
            optimizer.add_param_group({"params": list(model.down.parameters()), "lr": 0.01})

    return plain(model, to, optimizer=optimizer, after=after)


@loop()
def gradients_hooked(model, to):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return plain(model, to)


@loop()
def all_saved_and_loaded(model, to):
    optimizer, kept, losses = sgd(model), [], []
    for number, (x, y) in enumerate(batches(5)):
        loss = F.mse_loss(model(to(x)), to(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync(loss)
        if number == 1:
            kept = copy.deepcopy([{k: v.cpu() for k, v in model.state_dict().items()}, optimizer.state_dict()])
        if number == 3:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    return losses


@loop(Remembers)
def state_in_an_attribute(model, to):
    return plain(model, to)


@loop(Counts)
def counter_in_an_attribute(model, to):
    return plain(model, to)


@loop(Averages)
def average_of_all_batches(model, to):
    return plain(model, to)


def compared(name):
    function, of = LOOPS[name]
    torch.manual_seed(0)
    model = of()
    reference = copy.deepcopy(model)
    wanted = function(reference, lambda t: t)
    auto._LAST = None
    LACKING.clear()
    autoshard.use_spmd(auto=True, spmd_config={"auto_sharding": {"mesh": "2x4", "cache": False}})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = model.to("xla")
        found = function(model, lambda t: t.to("xla"))
    assert len(found) == len(wanted)
    return {
        "losses": max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, wanted, strict=True)),
        "parameters": max(
            (a.detach().cpu() - b.detach()).abs().max().item()
            for a, b in zip(model.parameters(), reference.parameters(), strict=True)
        ),
        "lacking": max(LACKING[1:], default=None),
        "planned": auto.current_plan() is not None,
        "warnings": [str(each.message) for each in said if each.category is AutoShardingWarning],
        "modes": torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
    }


if __name__ == "__main__":
    autoshard.use_spmd()
    Net().to("xla")(torch.ones(8, 32).to("xla")).sum().backward()  # autograd counts devices when it first runs
    scenarios.main({name: lambda name=name: compared(name) for name in LOOPS})
