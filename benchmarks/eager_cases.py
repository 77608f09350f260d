"""Optimizers and models for `eager.py`: every class of `torch.optim`, masters by hand, and what models do in a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autoshard.frontends.tracing.inputs import split_inputs
from autoshard.sources import Source

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]

# Optimizers.

REFUSED = ("LBFGS", "SparseAdam")
"""They step with a closure, or on sparse gradients alone: capture says so."""

WARM = {"RAdam": 6, "RAdam decoupled": 6, "ASGD averaged": 2}
"""Steps after which the captured step is what an optimizer does; 1 for the others."""


class Masters(torch.optim.Optimizer):
    """SGD with momentum on float32 copies of the weights, which are then written into them."""

    def __init__(self, parameters: Any, write: str, lr: float = 0.1) -> None:
        """`write` is how: by `copy_`, by `torch._foreach_copy_`, or by `.data.copy_`."""
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})
        self.write = write

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().to(torch.float32 if p.dtype.itemsize < 4 else p.dtype, copy=True)
                    state["momentum"] = torch.zeros_like(state["master"])
                state["momentum"].mul_(group["momentum"]).add_(p.grad.to(state["master"].dtype))
                state["master"].sub_(state["momentum"], alpha=group["lr"])
                if self.write == "copy":
                    p.copy_(state["master"])
                elif self.write == "data":
                    p.data.copy_(state["master"])
            if self.write == "foreach" and trained:
                torch._foreach_copy_(trained, [self.state[p]["master"] for p in trained])


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer that this torch has."""
    found = {name: each for name, each in vars(torch.optim).items() if inspect.isclass(each)}
    base = torch.optim.Optimizer
    return {name: each for name, each in sorted(found.items()) if issubclass(each, base) and each is not base}


def of_class(kind: type[torch.optim.Optimizer], parameters: list[Tensor], **settings: Any) -> torch.optim.Optimizer:
    """One with a learning rate whose steps can be told, over the matrices where it takes no other parameters."""
    default = inspect.signature(kind).parameters["lr"].default
    settings = {"lr": max(default, 0.1 if kind.__name__ in ("SGD", "Muon") else 0.01), **settings}
    if kind.__name__ == "Muon":
        parameters = [p for p in parameters if p.dim() == 2]
    return kind(parameters, **settings)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD maximize": ("SGD", {"lr": 0.01, "maximize": True}),
    "Adam amsgrad": ("Adam", {"amsgrad": True, "weight_decay": 0.01}),
    "Adam foreach": ("Adam", {"foreach": True}),
    "AdamW lr tensor": ("AdamW", {"lr": torch.tensor(0.01), "foreach": False}),
    "RMSprop centered": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Adagrad decayed": ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "NAdam decoupled": ("NAdam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    "RAdam decoupled": ("RAdam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    "ASGD averaged": ("ASGD", {"t0": 0.0}),
    "Rprop foreach": ("Rprop", {"foreach": True}),
}


def optimizers() -> dict[str, Optimizer]:
    """Name -> what makes it."""
    found: dict[str, Optimizer] = {name: partial(of_class, kind) for name, kind in classes().items()}
    found.update({name: partial(of_class, classes()[kind], **more) for name, (kind, more) in VARIANTS.items()})
    found.update({f"masters by {way}": partial(_masters, way) for way in ("copy", "foreach", "data")})
    found.update({f"Adafactor of {way}": partial(_adafactor, way) for way in ("fixed steps", "relative steps")})
    return found


def _adafactor(way: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """transformers', by either of the settings that its documentation names."""
    from transformers.optimization import Adafactor

    if way == "fixed steps":
        return Adafactor(parameters, lr=1e-2, scale_parameter=False, relative_step=False)
    return Adafactor(parameters, scale_parameter=True, relative_step=True)


def _masters(way: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    return Masters(parameters, way)


# Models.

MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {}


def model(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """List a function that gives a model, inputs, and a loss or None."""
    MODELS[build.__name__.replace("_", " ")] = build
    return build


GRADIENTS, FORWARD = "gradients only", "forward only"
"""In an optimizer's place: programs without one."""


def source(name: str, optimizer: str) -> Source:
    """A model of `MODELS`, or an entry of the zoo, under an optimizer, under its own, or without one."""
    torch.manual_seed(0)
    if name in MODELS:
        made, inputs, loss_fn = MODELS[name]()
        entry = Source(made.train(), inputs, loss_fn, train=True)
    else:
        from benchmarks.coverage import builders

        entry = builders()[name]()
    if optimizer == FORWARD:
        given = split_inputs(entry.model, entry.inputs, entry.loss_fn)
        return Source(entry.model, given.args or dict(given.kwargs))
    found = None if optimizer == GRADIENTS else optimizers().get(optimizer, entry.optimizer)
    return Source(entry.model, entry.inputs, entry.loss_fn, found, train=True)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def whole(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(2))


@model
def perceptron() -> Any:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return net, (normal(16, 8), normal(16, 8)), F.mse_loss


@model
def half_perceptron() -> Any:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(torch.bfloat16)
    return net, (normal(16, 8).bfloat16(), normal(16, 8).bfloat16()), lambda a, b: F.mse_loss(a.float(), b.float())


@model
def convolutional() -> Any:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2),
        nn.GELU(), nn.Flatten(), nn.Linear(72, 8),
    )  # fmt: skip
    return net, (normal(8, 3, 16, 16), whole(8, 8)), F.cross_entropy


class Recommender(nn.Module):
    """Embedding bags and an embedding beside dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.user = nn.EmbeddingBag(32, 8, mode="sum"), nn.Embedding(40, 8)
        self.dense, self.top = nn.Linear(8, 8), nn.Linear(24, 1)

    def forward(self, dense: Tensor, items: Tensor, user: Tensor) -> Tensor:
        parts = (self.dense(dense), self.bag(items), self.user(user))
        out: Tensor = self.top(torch.cat(parts, -1).tanh()).squeeze(-1)
        return out


@model
def recommender() -> Any:
    return Recommender(), (normal(16, 8), whole(32, 16, 4), whole(40, 16), normal(16)), F.mse_loss


class Recurrent(nn.Module):
    """Tokens through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(32, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 32)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.embed(text))[0]).flatten(0, 1), labels.flatten())


@model
def recurrent() -> Any:
    return Recurrent(), (whole(32, 8, 5), whole(32, 8, 5)), None


class Tied(nn.Module):
    """One weight as embedding and head, a frozen part, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(8))

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(self.inner(self.embed(text)).tanh())).transpose(1, 2)
        return out


@model
def tied() -> Any:
    return Tied(), (whole(32, 8, 6), whole(32, 8, 6)), F.cross_entropy


class Teacher(nn.Module):
    """A student and a teacher of averaged weights, which forward renews: by arithmetic, or by a copy."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied, self.student, self.teacher = copied, nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.copied:
                    slow.copy_(0.9 * slow + 0.1 * fast)
                else:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        return (self.student(x) - self.teacher(x).tanh() - 1).square().mean()


@model
def teacher() -> Any:
    return Teacher(False), (normal(16, 8),), None


@model
def copied_teacher() -> Any:
    return Teacher(True), (normal(16, 8),), None


class Queue(nn.Module):
    """Contrast with a queue of earlier keys, whose place is a counter in a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.encoder = how, nn.Linear(8, 8)
        self.register_buffer("queue", F.normalize(normal(32, 8), dim=1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.encoder(x), dim=1)
        logits = torch.cat([(keys * keys.roll(1, 0)).sum(1, keepdim=True), keys @ self.queue.clone().T], 1)
        with torch.no_grad():
            renewed = torch.cat([keys.detach(), self.queue[:-8]])
            if self.how == "copy":
                self.queue.copy_(renewed)
            elif self.how == "data":
                self.queue.data.copy_(renewed)
            elif self.how == "all":
                self.queue[:] = renewed
            elif self.how == "assigned":
                self.queue = renewed
            else:
                self.queue[8:] = self.queue[:-8].clone()
                self.queue[:8] = keys
            self.steps += 1
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.int64, device=x.device))


for _how in ("copy", "data", "all", "assigned", "slices"):
    MODELS[f"queue {_how}"] = partial(lambda how: (Queue(how), (normal(8, 8),), None), _how)


class Codebook(nn.Module):
    """Vectors quantized by a codebook that follows their averages."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.encoder, self.decoder = how, nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("codes", normal(16, 8))
        self.register_buffer("counts", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = F.one_hot(torch.cdist(z.detach(), self.codes.clone()).argmin(1), 16).to(z.dtype)
        made = z + (nearest @ self.codes.clone() - z).detach()
        with torch.no_grad():
            sums = nearest.T @ z
            counts = 0.9 * self.counts + 0.1 * nearest.sum(0)
            codes = self.codes + 0.1 * (sums - nearest.sum(0).unsqueeze(1) * self.codes)
            if self.how == "copy":
                self.counts.copy_(counts)
                self.codes.copy_(codes)
            else:
                self.counts.lerp_(nearest.sum(0), 0.1)
                self.codes.add_(codes - self.codes)
        return F.mse_loss(self.decoder(made), x) + F.mse_loss(z, made.detach() * 0.5)


@model
def codebook() -> Any:
    return Codebook("arithmetic"), (normal(16, 8),), None


@model
def copied_codebook() -> Any:
    return Codebook("copy"), (normal(16, 8),), None


class Statistics(nn.Module):
    """Buffers of every sort: renewed by ops that write a part, or all, or another tensor in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        for name in ("mean", "largest", "last", "filled", "scaled"):
            self.register_buffer(name, torch.ones(8))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("constant", normal(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) * self.constant + self.mean.clone() * self.last.clone()
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.5)
            torch.maximum(self.largest, h.amax(0), out=None)
            self.largest = torch.maximum(self.largest, h.amax(0))
            self.last.zero_().add_(h[-1])
            self.filled.fill_(2.0).mul_(self.mean)
            self.scaled.mul_(0.5)
            self.seen[1:3] += 1
        out: Tensor = self.out(torch.tanh(h + self.filled + self.scaled))
        return out.square().mean()


@model
def statistics() -> Any:
    return Statistics(), (normal(16, 8),), None


class Experts(nn.Module):
    """A token goes to the two best of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(0.3 * normal(4, 8, 16)), nn.Parameter(0.3 * normal(4, 16, 8))

    def forward(self, x: Tensor, aim: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        mask = F.one_hot(chosen, 4).to(x.dtype) * weights.unsqueeze(-1)
        each = torch.einsum("nd,edh->enh", x, self.up).relu()
        made = torch.einsum("enh,ehd,nke->nd", each, self.down, mask)
        return F.mse_loss(x + made, aim)


@model
def experts() -> Any:
    return Experts(), (normal(16, 8), normal(16, 8)), None


class Algebra(nn.Module):
    """Inverses and determinants, complex weights, rows of a table by their frequency, an observer of limits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.complex = nn.Parameter(torch.complex(0.1 * normal(8, 8), 0.1 * normal(8, 8)))
        self.table = nn.Embedding(12, 8, scale_grad_by_freq=True)
        for name, value in {"low": 0.0, "high": 0.0, "scale": 1.0}.items():
            self.register_buffer(name, torch.tensor([value]))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.inner(x) + self.table(tokens).mean(1)
        on = torch.ones(1, dtype=torch.int64, device=x.device)
        hidden = hidden + torch.fused_moving_avg_obs_fake_quant(
            hidden, on, on, self.low, self.high, self.scale, self.zero, 0.1, -128, 127, 0, False, False
        )
        square = hidden.mT @ hidden / len(x) + torch.eye(8, device=x.device)
        solved = hidden @ torch.linalg.inv(square) + torch.fft.irfft(torch.fft.rfft(hidden) * 0.5, n=8)
        turned = (torch.complex(solved, hidden) @ self.complex).abs()
        return (
            turned.mean() + torch.linalg.slogdet(square).logabsdet + torch.linalg.matrix_exp(self.inner.weight).mean()
        )


@model
def algebra() -> Any:
    return Algebra(), (normal(16, 8), whole(12, 16, 5)), None


@model
def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=32, use_cache=False, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {n: whole(32, 8, 8) for n in ("input_ids", "labels")}, None


@model
def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, max_position_embeddings=8, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {n: whole(32, 8, 8) for n in ("input_ids", "labels")}, None
