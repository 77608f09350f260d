"""Models of many kinds: the captured forward pass is what PyTorch computes, or is refused in one line."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import CaptureError
from tests.frontends.test_writes import Run

FRONTENDS = ("torch_xla", "torchax")
Body = Callable[[Any, torch.Tensor], Any]


class Net(nn.Module):
    """16 rows of 8 through a layer, then what it is told."""

    def __init__(self, body: Body, **modules: nn.Module) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(8, 8), body
        for name, module in modules.items():
            self.add_module(name, module)
        self.counts: torch.Tensor
        self.register_buffer("counts", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).mT


@dataclasses.dataclass
class Found:
    scores: torch.Tensor
    nothing: None = None


Pair = collections.namedtuple("Pair", "first second")


def in_slices(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    h[:, ::2] += 1.0
    h.view(-1)[3:20].mul_(2.0)
    h.t()[2:4].zero_()
    h.masked_fill_(x > 1, h.mean())
    h[:, [0, 2]] = h[:, [1, 3]]
    return h


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    with torch.no_grad():
        m.counts.index_add_(0, h.argmax(1), torch.ones(16, device=h.device))
    return h * m.counts


def unpooled(m: Any, x: torch.Tensor) -> torch.Tensor:
    made, at = F.max_pool2d(m.layer(x).view(1, 2, 8, 8), 2, return_indices=True)
    return F.max_unpool2d(made, at, 2)


def ensemble(m: Any, x: torch.Tensor) -> torch.Tensor:
    parameters, buffers = torch.func.stack_module_state(list(m.several))
    one = m.several[0]
    return torch.vmap(lambda p, b: torch.func.functional_call(one, (p, b), (x,)))(parameters, buffers).mean(0)


def attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x).view(4, 4, 8)
    return m.attends(h, h, h, average_attn_weights=False)[0]


def rotated(m: Any, x: torch.Tensor) -> torch.Tensor:
    turns = torch.polar(torch.ones(4, device=x.device), torch.arange(4.0, device=x.device))
    return torch.view_as_real(torch.view_as_complex(m.layer(x).view(16, 4, 2)) * turns).flatten(1)


def complex_products(m: Any, x: torch.Tensor) -> torch.Tensor:
    found = torch.view_as_complex(m.layer(x).view(16, 4, 2))
    weights = torch.complex(m.layer.weight[:4, :4], m.layer.weight[4:, 4:])
    turned = torch.einsum("bi,oi->bo", F.linear(found, weights), weights) @ weights.expand(2, 4, 4)
    filled = found.masked_fill(found.real > 0, 1 + 2j) * weights[0]
    turned = torch.addcmul(torch.addcdiv(turned, found, found + 4, value=1j), found, filled, value=2 - 1j)
    return torch.view_as_real(turned.view(2, 16, 4)).flatten(2)


def learned_from(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As MAML does: what a table is after a step of its own."""
    places = x.argsort(1)[:, :3]
    (slope,) = torch.autograd.grad(m.table(places).tanh().square().sum(), m.table.weight, create_graph=True)
    return m.layer(F.embedding(places, m.table.weight - 0.5 * slope, padding_idx=0).flatten(1)[:, :8])


def penalised(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A penalty on slopes behind a checkpoint, which recomputes under `torch.autograd.grad`."""
    h = m.layer(x)
    out = checkpoint(lambda x: m.inner(x).tanh(), h, use_reentrant=False)
    (slope,) = torch.autograd.grad(out.square().sum(), h, create_graph=True)
    none = torch.autograd.grad(slope.sum(), [m.inner.weight, m.inner.bias], retain_graph=True, allow_unused=True)
    zeros, _ = torch.autograd.grad([out], [m.unused.weight, h], [slope], retain_graph=True, materialize_grads=True)
    return out + slope.square().mean() + none[0].mean() + zeros.sum()


def into(m: Any, x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(16, 2, 8, device=x.device)
    torch.matmul(x.detach().view(16, 2, 4), x[:4].detach(), out=made)
    return m.layer(x) * made.sum(1) + torch.matmul(m.layer(x), x.T, out=None).sum()


def quotients(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Of integers beyond float32's digits."""
    large = (x.argsort(1) - 4) * 123_456_789_011
    narrow = x.argsort(0).to(torch.int32) * 143_165_577
    found = large // 1237 % 5 + large.div(x.argsort(0) + 7, rounding_mode="trunc") % 3 + narrow // 7 % 11
    return m.layer(x) * (found + 5 % (x.argsort(1) + 1))


def nested(m: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: m.layer(x).tanh(), x, use_reentrant=False).sin()

    return checkpoint(inner, m.layer(x), use_reentrant=False)


MODELS: dict[str, tuple[Body, dict[str, Callable[[], nn.Module]]]] = {
    "repeated positions": (
        lambda m, x: m.layer(x).index_put((torch.tensor([0, 1, 1], device=x.device),), x[:3], accumulate=True), {},
    ),
    "function that writes": (lambda m, x: Doubled.apply(m.layer(x)), {}),
    "sorted along": (lambda m, x: torch.take_along_dim(m.layer(x), m.layer(x).argsort(1), 1), {}),
    "scattered best": (lambda m, x: torch.zeros_like(x).scatter(1, m.layer(x).topk(2, 1).indices, 1.0), {}),
    "best embedded": (lambda m, x: m.table(m.layer(x).argmax(1)), {"table": lambda: nn.Embedding(8, 4)}),
    "embedded by what was learned": (learned_from, {"table": lambda: nn.Embedding(8, 4, padding_idx=2)}),
    "short rows embedded": (
        lambda m, x: m.table(x.argsort(1)[:, :3]), {"table": lambda: nn.Embedding(8, 4, max_norm=1.0)},
    ),
    "largest so far": (lambda m, x: m.layer(x).cummax(-1)[0] * m.layer(x).view(16, 2, 4).cummin(2)[0].flatten(1), {}),
    "gated both ways": (
        lambda m, x: m.gated(m.layer(x).view(4, 4, 8))[0], {"gated": lambda: nn.GRU(8, 4, 2, bidirectional=True)},
    ),
    "projected memory": (lambda m, x: m.memory(m.layer(x).view(4, 4, 8))[1][0],
                         {"memory": lambda: nn.LSTM(8, 8, proj_size=4)}),
    "bags with offsets": (
        lambda m, x: m.bags(x.argsort(1).flatten(), torch.arange(0, 128, 8, device=x.device)),
        {"bags": lambda: nn.EmbeddingBag(8, 4, mode="mean")},
    ),
    "diagonal of products": (lambda m, x: torch.einsum("bii,...ij->b", m.layer(x).view(2, 8, 8), x[:8]), {}),
    "products of complex numbers": (complex_products, {}),
    "transposed convolution": (
        lambda m, x: m.up(m.layer(x).view(2, 4, 4, 4)),
        {"up": lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2, output_padding=1)},
    ),
    "dilated convolution": (
        lambda m, x: m.wide(m.layer(x).view(2, 4, 4, 4)),
        {"wide": lambda: nn.Conv2d(4, 4, 3, groups=2, dilation=2, padding=2, padding_mode="circular")},
    ),
    "pulled back": (lambda m, x: torch.func.vjp(torch.exp, m.layer(x))[1](x)[0] + m.layer(x), {}),
    "slopes of a vector": (lambda m, x: torch.func.jacrev(torch.tanh)(m.layer(x)[0]), {}),
    "places taken twice": (lambda m, x: m.layer(x).take(torch.tensor([0, 5, 5], device=x.device)), {}),
    "whole powers": (lambda m, x: m.layer(x) * (torch.arange(8, device=x.device) ** 2 + 2 ** x.argsort(1)), {}),
    "remainders of nothing": (lambda m, x: torch.fmod(m.layer(x), 3.0) + torch.fmod(x, torch.inf), {}),
    "many counted": (lambda m, x: m.layer(x) * (x > -9).repeat(20, 1).cumsum(0)[304:], {}),
    "frequencies": (lambda m, x: m.layer(x) * torch.fft.fftfreq(8, 0.5, device=x.device), {}),
    "backwards": (
        lambda m, x: m.layer(x) * (x.argsort(1).to(torch.uint8) * 36).sort(1, descending=True)[0].float(), {},
    ),
    "nested results": (lambda m, x: Pair(m.layer(x), [x, {"more": (x.sum(), None, 3)}]), {}),
    "result of a class": (lambda m, x: {"found": m.layer(x), "again": (m.layer(x), None)}, {}),
    "no rows": (lambda m, x: torch.cat([m.layer(x), m.layer(x[:0])]), {}),
    "single numbers": (lambda m, x: m.layer(x).sum() * m.layer.weight[0, 0], {}),
    "wide numbers": (lambda m, x: m.layer(x).double().sum(1), {}),
    "symmetric weight": (
        lambda m, x: m.inner(x),
        {"inner": lambda: nn.utils.parametrize.register_parametrization(nn.Linear(8, 8), "weight", Symmetric())},
    ),
    "weight norm": (lambda m, x: m.inner(x), {"inner": lambda: parametrizations.weight_norm(nn.Linear(8, 8))}),
    "spectral norm": (lambda m, x: m.inner(x), {"inner": lambda: parametrizations.spectral_norm(nn.Linear(8, 8))}),
    "compiled": (lambda m, x: m.inner(x), {"inner": lambda: torch.compile(nn.Linear(8, 8))}),
    "in parallel": (lambda m, x: m.inner(x), {"inner": lambda: nn.DataParallel(nn.Linear(8, 8))}),
    "pruned": (lambda m, x: m.inner(x), {"inner": lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.3)}),
    "penalised": (penalised, {"inner": lambda: nn.Linear(8, 8), "unused": lambda: nn.Linear(2, 2)}),
    "ensemble": (ensemble, {"several": lambda: nn.ModuleList(nn.Linear(8, 4) for _ in range(3))}),
    "attention": (attention, {"attends": lambda: nn.MultiheadAttention(8, 2, batch_first=True)}),
    **{each.__name__: (each, {}) for each in (in_slices, counted, unpooled, rotated, nested, into, quotients)},
}  # fmt: skip


def of(name: str) -> Net:
    torch.manual_seed(0)
    body, modules = MODELS[name]
    return Net(body, **{key: make() for key, make in modules.items()})


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:LSTM with projections")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_is_captured_is_what_pytorch_computes(name: str, frontend: str) -> None:
    model, eager, batches = of(name), of(name), torch.randn(2, 16, 8)
    optimizer = None
    step: dict[str, Any] = {"train": False}
    if any(leaf.requires_grad for leaf in tensors(of(name)(batches[0]))):
        step = {"loss_fn": loss_of, "optimizer": sgd}
        optimizer = sgd(eager.parameters())
    program = autoshard.capture(model, batches[0], frontend=frontend, **step)
    run = Run(program, model)
    for batch in batches:
        made, found = run(batch), eager(batch)
        if optimizer is not None:
            loss = loss_of(found)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(made["loss"], loss.detach(), rtol=1e-4, atol=1e-4)
            continue
        outputs = [made[output.name] for output in program.outputs if output.role == "output"]
        for mine, theirs in zip(outputs, tensors(found), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)
    for key, tensor in (*eager.named_parameters(), *eager.named_buffers()):
        torch.testing.assert_close(
            run.tensors[key], tensor.detach(), rtol=1e-4, atol=1e-5, msg=lambda said, k=key: f"{k}: {said}"
        )


def tensors(found: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def loss_of(found: Any) -> torch.Tensor:
    """Every output that has a gradient, each element of a weight of its own."""
    weighed = (
        leaf * torch.arange(float(leaf.numel()), device=leaf.device).cos().view(leaf.shape)
        for leaf in tensors(found)
        if leaf.requires_grad
    )
    return torch.stack([each.sum() for each in weighed]).sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_single_numbers_and_narrow_products_without_torch_xla() -> None:
    """torch_xla refuses both."""

    def body(m: Any, x: torch.Tensor) -> Any:
        narrow = (x.argsort(1) + 1).to(torch.int8)
        return m.layer(x).sum().sort()[0], x.sum().topk(1)[1], x[:0].cumsum(0), narrow.cumprod(1)

    model, x = Net(body), torch.randn(16, 8)
    program = autoshard.capture(model, x, train=False, frontend="torchax")
    made = Run(program, model)(x)
    outputs = [made[output.name] for output in program.outputs if output.role == "output"]
    for mine, theirs in zip(outputs, model(x), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_permutation_is_one(frontend: str) -> None:
    model = Net(lambda m, x: m.layer(x)[torch.randperm(16, device=x.device)])
    program = autoshard.capture(model, torch.zeros(16, 8), train=False, frontend=frontend)
    x = torch.randn(16, 8)
    rows, wanted = Run(program, model)(x)["output"], model.layer(x).detach()
    assert not torch.equal(rows, wanted)
    torch.testing.assert_close(rows.sort(0).values, wanted.sort(0).values)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda m, x: m.layer(x)[x[:, 0] > 0], "shape"),
        (lambda m, x: m.layer(x).unique(), "_unique2"),
        (lambda m, x: m.layer(x) * float(torch.rand(2, device=x.device).sum()), "reads the value"),
        (lambda m, x: Found(m.layer(x)), "the model's output holds no tensor"),
    ],
)
def test_what_has_no_program_is_refused_in_one_line(body: Body, said: str, frontend: str) -> None:
    with pytest.raises(CaptureError, match=said) as raised:
        autoshard.capture(Net(body), torch.randn(16, 8), train=False, frontend=frontend)
    assert "\n" not in str(raised.value)
