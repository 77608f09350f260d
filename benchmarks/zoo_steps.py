"""Training steps for `coverage.py` that are more than forward, backward, SGD: averages, clipping, two optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.nets import mlp
from benchmarks.zoo_entry import BATCH, SEQ, WIDTH, classes, entry, floats, tokens
from benchmarks.zoo_hf import LEARNING_RATE, build


class Block(nn.Module):
    """A pre-norm transformer block; `run` is how its parts are called."""

    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(made))
        kept: Tensor = x + self.drop(self.mlp(self.norm_2(x)))
        return kept


class Language(nn.Module):
    """A small causal language model that returns its loss."""

    def __init__(self, layers: int = 2, tied: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(Block(drop=drop) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def inner(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.inner(self.embed(text))))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def text() -> tuple[Tensor, Tensor]:
    return tokens(BATCH, SEQ), tokens(BATCH, SEQ)


@entry
def tied_weights() -> Any:
    return Language(tied=True), text(), None


@entry
def shared_module() -> Any:
    class Universal(Language):
        def inner(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.blocks[0](x)
            return x

    return Universal(layers=1), text(), None


@entry
def gradient_accumulation() -> Any:
    class Accumulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Language(layers=1)

        def forward(self, text: Tensor, labels: Tensor) -> Tensor:
            losses = [self.model(t, y) for t, y in zip(text.chunk(2), labels.chunk(2), strict=True)]
            return torch.stack(losses).mean()

    return Accumulated(), (tokens(2 * BATCH, SEQ), tokens(2 * BATCH, SEQ)), None


class ClippedSGD(torch.optim.SGD):
    """SGD on gradients whose whole norm is clipped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


@entry
def gradient_clipping() -> Any:
    return Language(), text(), None, lambda parameters: ClippedSGD(parameters, lr=LEARNING_RATE)


class AveragedSGD(torch.optim.SGD):
    """SGD that keeps an exponential moving average of every weight as its state."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for p in group["params"]:
            if p.grad is not None and "average" not in self.state[p]:
                self.state[p]["average"] = p.detach().clone()
        return super()._init_group(group, *lists) if lists else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self._init_group(group)
        made = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["average"].lerp_(p, 0.01)
        return made


@entry
def average_of_weights() -> Any:
    return Language(), text(), None, lambda parameters: AveragedSGD(parameters, lr=LEARNING_RATE)


@entry
def average_in_the_model() -> Any:
    """A teacher of averaged weights in buffers, as in BYOL (arXiv:2006.07733)."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.predictor = mlp([WIDTH, 128, 32]), nn.Linear(32, 32)
            self.teacher = mlp([WIDTH, 128, 32])
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.mul_(0.99).add_(fast.detach(), alpha=0.01)
                aim = F.normalize(self.teacher(two), dim=-1)
            made = F.normalize(self.predictor(self.student(one)), dim=-1)
            return 2 - 2 * (made * aim).sum(-1).mean()

    return Student(), (floats(BATCH, WIDTH), floats(2 * BATCH, WIDTH)[BATCH:].clone()), None


class Both(torch.optim.Optimizer):
    """Two optimizers that step together."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = [first, second]
        super().__init__([*first.param_groups, *second.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


class Gan(nn.Module):
    """A generator and a discriminator that are updated together from one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp([16, 128, WIDTH]), mlp([WIDTH, 128, 1])

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise)
        frozen = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        fooled = torch.func.functional_call(self.discriminator, frozen, (fake,))
        loss = F.softplus(self.discriminator(fake.detach())).mean() + F.softplus(-self.discriminator(real)).mean()
        return loss + F.softplus(-fooled).mean()


@entry
def gan_of_two_optimizers() -> Any:
    def both(parameters: list[Tensor]) -> Both:
        first = torch.optim.SGD(parameters[:4], lr=LEARNING_RATE)
        return Both(first, torch.optim.SGD(parameters[4:], lr=LEARNING_RATE / 2, momentum=0.5))

    return Gan(), (floats(BATCH, 16), floats(BATCH, WIDTH)), None, both


@entry
def gan_of_two_groups() -> Any:
    def groups(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}], lr=LEARNING_RATE)

    return Gan(), (floats(BATCH, 16), floats(BATCH, WIDTH)), None, groups


@entry
def bf16_autocast() -> Any:
    class Mixed(Language):
        def forward(self, text: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast(text.device.type, dtype=torch.bfloat16):
                return super().forward(text, labels)

    return Mixed(), text(), None


@entry
def autocast_of_cuda_by_decorator() -> Any:
    class Mixed(Language):
        @torch.autocast("cuda", dtype=torch.bfloat16)
        def forward(self, text: Tensor, labels: Tensor) -> Tensor:
            return super().forward(text, labels)

    return Mixed(), text(), None


@entry
def bf16_weights() -> Any:
    return Language().to(torch.bfloat16), text(), None


class Checkpointed(Language):
    """Blocks that are computed again, as `how` calls torch's checkpoint."""

    def __init__(self, drop: float = 0.0, **how: Any) -> None:
        super().__init__(drop=drop)
        self.how = {"use_reentrant": False, **how}

    def inner(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return x


@entry
def activation_checkpointing() -> Any:
    class OfTorchXla(Language):
        def inner(self, x: Tensor) -> Tensor:
            if x.device.type != "xla":
                return super().inner(x)
            from torch_xla.utils.checkpoint import checkpoint

            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    return OfTorchXla(), text(), None


@entry
def selective_checkpointing() -> Any:
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    return Checkpointed(context_fn=contexts), text(), None


@entry
def checkpointing_with_dropout() -> Any:
    return Checkpointed(drop=0.1), text(), None


@entry
def reentrant_checkpointing_with_dropout() -> Any:
    return Checkpointed(drop=0.1, use_reentrant=True), text(), None


def checkpoints_of_transformers(**how: Any) -> Any:
    source = build("llama", "AutoModelForCausalLM", lambda config: {})
    source.model.gradient_checkpointing_enable(how)
    return source.model, {"input_ids": text()[0], "labels": text()[1]}, None


@entry
def gradient_checkpointing_of_transformers() -> Any:
    return checkpoints_of_transformers(use_reentrant=False)


@entry
def reentrant_gradient_checkpointing_of_transformers() -> Any:
    return checkpoints_of_transformers(use_reentrant=True)


@entry
def dropout() -> Any:
    return Language(drop=0.1), text(), None


@entry
def scan_over_layers() -> Any:
    class Scanned(Language):
        def inner(self, x: Tensor) -> Tensor:
            if x.device.type != "xla":
                return super().inner(x)
            from torch_xla.experimental.scan_layers import scan_layers

            made: Tensor = scan_layers(self.blocks, x)
            return made

    return Scanned(layers=3), text(), None


@entry
def adamw() -> Any:
    return Language(), text(), None, lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE)


@entry
def momentum() -> Any:
    return Language(), text(), None, lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=0.9, weight_decay=0.01)


@entry
def low_rank_adapters() -> Any:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner.requires_grad_(False)
            self.down = nn.Linear(inner.in_features, 4, bias=False)
            self.up = nn.Linear(4, inner.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.inner(x) + self.up(self.down(x))
            return made

    model = Language()
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
    return model, text(), None


@entry
def distillation() -> Any:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = mlp([WIDTH, 32, 10]), mlp([WIDTH, 256, 10])
            self.teacher.requires_grad_(False).eval()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            made = self.student(x)
            with torch.no_grad():
                aim = F.softmax(self.teacher(x) / 2, -1)
            return F.cross_entropy(made, labels) + F.kl_div(F.log_softmax(made / 2, -1), aim, reduction="batchmean")

    return Distilled(), (floats(BATCH, WIDTH), classes()), None


@entry
def second_derivatives() -> Any:
    """A critic whose gradient is kept near 1, as in WGAN-GP (arXiv:1704.00028)."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            score = self.inner(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return Critic(), (floats(BATCH, WIDTH),), None
