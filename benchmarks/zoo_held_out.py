"""Entries of sorts that the rest of the zoo has not: written at once, to see how many of such pass the first time.

Reinforcement learning, flows, physics, sets and graphs in space, sound, time series, meta-learning, and steps that read
values. What is said of the first time is in docs/coverage.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.zoo_entry import BATCH, SEQ, WIDTH, classes, entry, floats, mean_square, tokens, uniform


def net_of(forward: Callable[..., Any], **modules: nn.Module) -> Any:
    """A module with modules by name, whose forward pass is a function of it and the inputs."""
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, module in modules.items():
        made.add_module(name, module)
    return made


def mlp(*sizes: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def itself(out: Tensor) -> Tensor:
    return out


# Reinforcement learning.


@entry
def proximal_policy() -> tuple[Any, ...]:
    def run(self: Any, seen: Tensor, action: Tensor, old: Tensor, advantage: Tensor, returns: Tensor) -> Tensor:
        h = self.body(seen)
        chosen = torch.distributions.Categorical(logits=self.actor(h))
        ratio = (chosen.log_prob(action) - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value = F.mse_loss(self.critic(h).squeeze(-1), returns)
        return value - gain - 0.01 * chosen.entropy().mean()

    net = net_of(run, body=mlp(16, WIDTH, WIDTH, act=nn.Tanh), actor=nn.Linear(WIDTH, 8), critic=nn.Linear(WIDTH, 1))
    many = BATCH * 4
    given = (floats(many, 16), tokens(many, below=8, least=0), -uniform(many), floats(many), uniform(many))
    return net, given, itself


@entry
def double_q_learning() -> tuple[Any, ...]:
    def run(self: Any, now: Tensor, action: Tensor, reward: Tensor, then: Tensor, done: Tensor) -> Tensor:
        value = self.online(now).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.online(then).argmax(1, keepdim=True)
            target = reward + 0.99 * (1 - done.float()) * self.target(then).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(value, target)

    net = net_of(
        run, online=mlp(16, WIDTH, 8, act=nn.ReLU), target=mlp(16, WIDTH, 8, act=nn.ReLU).requires_grad_(False)
    )
    many = BATCH * 4
    done = tokens(many, below=2, least=0).bool()
    return net, (floats(many, 16), tokens(many, below=8, least=0), uniform(many), floats(many, 16) + 1, done), itself


@entry
def soft_actor_critic() -> tuple[Any, ...]:
    def run(self: Any, seen: Tensor, noise: Tensor, reward: Tensor) -> Tensor:
        mean, spread = self.actor(seen).chunk(2, -1)
        spread = spread.clamp(-5, 2)
        raw = mean + spread.exp() * noise
        action = raw.tanh()
        log = (-0.5 * noise**2 - spread - 0.5 * math.log(2 * math.pi) - torch.log(1 - action**2 + 1e-6)).sum(-1)
        q1, q2 = (q(torch.cat([seen, action], -1)).squeeze(-1) for q in (self.q1, self.q2))
        alpha = self.temperature(torch.ones(1, device=seen.device)).exp()
        return (
            (alpha.detach() * log - torch.min(q1, q2)).mean() + F.mse_loss(q1, reward) - (alpha * log.detach()).mean()
        )

    parts = {"q1": mlp(20, WIDTH, 1), "q2": mlp(20, WIDTH, 1), "temperature": nn.Linear(1, 1)}
    net = net_of(run, actor=mlp(16, WIDTH, 8), **parts)
    return net, (floats(BATCH, 16), floats(BATCH, 4), uniform(BATCH)), itself


# Densities.


@entry
def real_nvp() -> tuple[Any, ...]:
    class Coupling(nn.Module):
        def __init__(self, even: bool) -> None:
            super().__init__()
            self.net = mlp(16, WIDTH, 32)
            self.register_buffer("mask", (torch.arange(16) % 2 == int(even)).float())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scale, shift = self.net(x * self.mask).chunk(2, -1)
            scale = scale.tanh() * (1 - self.mask)
            return x * scale.exp() + shift * (1 - self.mask), scale.sum(-1)

    def run(self: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, log = layer(x)
            total = total + log
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1) + total).mean()

    return net_of(run, layers=nn.ModuleList(Coupling(i % 2 == 0) for i in range(4))), (floats(BATCH * 4, 16),), itself


@entry
def glow_with_invertible_mixing() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        size = x.shape[2] * x.shape[3]
        weight = self.mix.weight
        x = F.conv2d(x, weight[:, :, None, None])
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        scale = torch.sigmoid(scale + 2)
        log = scale.log().sum((1, 2, 3)) + size * torch.linalg.slogdet(weight)[1]
        return (0.5 * torch.cat([a, b * scale + shift], 1).square().sum((1, 2, 3)) - log).mean() / size

    net = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1))
    made = net_of(run, mix=nn.Linear(8, 8, bias=False), net=net)
    nn.init.orthogonal_(made.mix.weight)
    return made, (floats(BATCH, 8, 8, 8),), itself


@entry
def mixture_density() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, y: Tensor) -> Tensor:
        weight, mean, spread = self.net(x).chunk(3, -1)
        normal = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        return -torch.logsumexp(F.log_softmax(weight, -1) + normal.log_prob(y), -1).mean()

    return net_of(run, net=mlp(8, WIDTH, WIDTH, 15)), (floats(BATCH * 4, 8), uniform(BATCH * 4, 1)), itself


@entry
def denoising_diffusion() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        betas = torch.linspace(1e-4, 0.02, 100, device=x.device)
        kept = torch.cumprod(1 - betas, 0)[t].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        frequencies = torch.exp(-math.log(1e4) * torch.arange(16, device=x.device) / 16)
        angles = t[:, None].float() * frequencies
        step = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        h = F.silu(self.norm(self.enter(noisy) + step[:, :, None, None]))
        return F.mse_loss(self.leave(h), noise)

    parts = {"norm": nn.GroupNorm(8, 32), "leave": nn.Conv2d(32, 3, 3, padding=1)}
    net = net_of(run, time=mlp(32, WIDTH, 32), enter=nn.Conv2d(3, 32, 3, padding=1), **parts)
    return net, (floats(BATCH, 3, 16, 16), tokens(BATCH, below=100), floats(BATCH, 3, 16, 16) * 0.9), itself


@entry
def energy_by_langevin() -> tuple[Any, ...]:
    def run(self: Any, real: Tensor, start: Tensor) -> Tensor:
        fake = start.detach().requires_grad_(True)
        for _ in range(3):
            (slope,) = torch.autograd.grad(self.energy(fake).sum(), fake)
            fake = (fake - 0.1 * slope).detach().requires_grad_(True)
        up, down = self.energy(real), self.energy(fake.detach())
        return (up - down).mean() + 0.1 * (up**2 + down**2).mean()

    return (
        net_of(run, energy=mlp(16, WIDTH, WIDTH, 1, act=nn.SiLU)),
        (floats(BATCH * 4, 16), uniform(BATCH * 4, 16)),
        itself,
    )


@entry
def wasserstein_with_gradient_penalty() -> tuple[Any, ...]:
    def run(self: Any, real: Tensor, noise: Tensor, mixed: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        between = (mixed * real + (1 - mixed) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty

    net = net_of(run, generator=mlp(8, WIDTH, 16), critic=mlp(16, WIDTH, WIDTH, 1, act=nn.LeakyReLU))
    return net, (floats(BATCH * 4, 16), floats(BATCH * 4, 8), uniform(BATCH * 4, 1)), itself


@entry
def discrete_autoencoder_by_gumbel() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, drawn: Tensor) -> Tensor:
        logits = self.encode(x).view(-1, 8, 16)
        soft = ((logits - torch.log(-torch.log(drawn.clamp(1e-6, 1 - 1e-6)))) / 0.7).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 16).to(soft.dtype)
        z = (hard - soft.detach() + soft).flatten(1)
        q = logits.softmax(-1)
        return F.mse_loss(self.decode(z), x) + 0.1 * (q * (q * 16 + 1e-8).log()).sum(-1).mean()

    net = net_of(run, encode=mlp(32, WIDTH, 128), decode=mlp(128, WIDTH, 32))
    return net, (floats(BATCH * 2, 32), uniform(BATCH * 2, 8, 16)), itself


# Physics, and functions of coordinates.


@entry
def physics_informed() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, t: Tensor) -> Tensor:
        x, t = (each.detach().requires_grad_(True) for each in (x, t))
        u = self.net(torch.cat([x, t], -1))
        first = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (second,) = torch.autograd.grad(first[0].sum(), x, create_graph=True)
        rest = first[1] + u * first[0] - 0.01 * second
        return rest.square().mean() + (self.net(torch.cat([x, torch.zeros_like(t)], -1)) + x.sin()).square().mean()

    return net_of(run, net=mlp(2, WIDTH, WIDTH, 1, act=nn.Tanh)), (floats(BATCH * 8, 1), uniform(BATCH * 8, 1)), itself


@entry
def sines_all_the_way() -> tuple[Any, ...]:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(3.0 * x)

    def run(self: Any, at: Tensor, color: Tensor) -> Tensor:
        turned = 2 * math.pi * at @ self.features.weight.t()
        return F.mse_loss(self.net(torch.cat([turned.sin(), turned.cos()], -1)), color)

    net = net_of(run, features=nn.Linear(2, 16, bias=False).requires_grad_(False), net=mlp(32, WIDTH, 3, act=Sine))
    return net, (uniform(BATCH * 16, 2), floats(BATCH * 16, 3)), itself


@entry
def splines_on_edges() -> tuple[Any, ...]:
    class Edges(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            knots = torch.linspace(-2.5, 2.5, 12).repeat(into, 1)
            self.register_buffer("knots", knots)
            self.spline = nn.Parameter(torch.randn(out, into, 8) * 0.1)
            self.base = nn.Parameter(torch.randn(out, into) / math.sqrt(into))

        def forward(self, x: Tensor) -> Tensor:
            at, knots = x.unsqueeze(-1), self.knots
            basis = ((at >= knots[:, :-1]) & (at < knots[:, 1:])).to(x.dtype)
            for k in range(1, 4):
                left = (at - knots[:, : -k - 1]) / (knots[:, k:-1] - knots[:, : -k - 1])
                right = (knots[:, k + 1 :] - at) / (knots[:, k + 1 :] - knots[:, 1:-k])
                basis = left * basis[..., :-1] + right * basis[..., 1:]
            return F.linear(F.silu(x), self.base) + torch.einsum("bik,oik->bo", basis, self.spline)

    net = nn.Sequential(Edges(8, 32), Edges(32, 8))
    return net, (uniform(BATCH * 4, 8), classes().repeat(4)), F.cross_entropy


@entry
def points_in_space() -> tuple[Any, ...]:
    def run(self: Any, h: Tensor, at: Tensor) -> Tensor:
        h = self.enter(h)
        for edge, move, node in zip(self.edges, self.moves, self.nodes, strict=True):
            apart = at.unsqueeze(2) - at.unsqueeze(1)
            far = apart.square().sum(-1, keepdim=True)
            pair = (h.unsqueeze(2).expand(-1, -1, 12, -1), h.unsqueeze(1).expand(-1, 12, -1, -1), far)
            m = edge(torch.cat(pair, -1))
            m = m * (1 - torch.eye(12, device=h.device)).unsqueeze(-1)
            at = at + (apart / (far + 1e-3).sqrt() * move(m)).mean(2)
            h = h + node(torch.cat([h, m.sum(2)], -1))
        return h.mean(1).square().mean() + at.square().mean()

    parts = {
        "edges": nn.ModuleList(mlp(65, WIDTH, 32, act=nn.SiLU) for _ in range(2)),
        "moves": nn.ModuleList(nn.Linear(32, 1) for _ in range(2)),
        "nodes": nn.ModuleList(mlp(64, WIDTH, 32, act=nn.SiLU) for _ in range(2)),
    }
    return net_of(run, enter=nn.Linear(8, 32), **parts), (floats(BATCH, 12, 8), uniform(BATCH, 12, 3)), itself


# Sets and graphs.


@entry
def neighbours_of_points() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        for conv in self.convs:
            near = torch.cdist(x, x).topk(4, -1, largest=False).indices
            around = torch.gather(
                x.unsqueeze(1).expand(-1, 16, -1, -1), 2, near.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
            )
            x = conv(torch.cat([x.unsqueeze(2).expand_as(around), around - x.unsqueeze(2)], -1)).amax(2)
        return self.head(x.amax(1))

    net = net_of(run, convs=nn.ModuleList([mlp(6, 32, 32), mlp(64, 64, 64)]), head=nn.Linear(64, 8))
    return net, (floats(BATCH, 16, 3), classes()), F.cross_entropy


@entry
def graphs_of_many_sizes() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, source: Tensor, target: Tensor, graph: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + torch.zeros_like(x).index_add(0, target, x[source]))
        total = x.new_zeros(BATCH, x.shape[-1]).index_add(0, graph, x)
        count = torch.bincount(graph, minlength=BATCH).clamp(min=1)
        return self.head(total / count.unsqueeze(-1))

    layers = nn.ModuleList([mlp(16, WIDTH, 32), mlp(32, WIDTH, 32)])
    graph = torch.arange(BATCH).repeat_interleave(6)
    edges = (tokens(96, below=48, least=0), tokens(96, below=48, least=0))
    return (
        net_of(run, layers=layers, head=nn.Linear(32, 8)),
        (floats(48, 16), *edges, graph, classes()),
        F.cross_entropy,
    )


@entry
def induced_sets() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        points = self.points.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        x = self.enter(x)
        h = self.first(points, x, x, need_weights=False)[0]
        x = self.norm(x + self.second(x, h, h, need_weights=False)[0])
        seed = self.seed.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        return self.head(self.pool(seed, x, x, need_weights=False)[0].squeeze(1))

    parts = {n: nn.MultiheadAttention(WIDTH, 4, batch_first=True) for n in ("first", "second", "pool")}
    more = {"points": nn.Embedding(4, WIDTH), "seed": nn.Embedding(1, WIDTH), "norm": nn.LayerNorm(WIDTH)}
    net = net_of(run, enter=nn.Linear(8, WIDTH), head=nn.Linear(WIDTH, 8), **parts, **more)
    return net, (floats(BATCH, SEQ, 8), classes()), F.cross_entropy


@entry
def slots_by_attention() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.norm(x)
        keys, values = self.keys(x), self.values(x)
        slots = self.start.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        for _ in range(3):
            scores = torch.einsum("bsd,bnd->bsn", self.queries(slots), keys) / 8
            share = scores.softmax(1) + 1e-8
            update = (share / share.sum(-1, keepdim=True)) @ values
            slots = self.cell(update.reshape(-1, WIDTH), slots.reshape(-1, WIDTH)).view_as(update)
        return slots.square().mean() + self.decode(slots).square().mean()

    parts = {n: nn.Linear(WIDTH, WIDTH, bias=False) for n in ("keys", "values", "queries")}
    more = {"start": nn.Embedding(4, WIDTH), "cell": nn.GRUCell(WIDTH, WIDTH), "decode": mlp(WIDTH, 128, WIDTH)}
    return net_of(run, norm=nn.LayerNorm(WIDTH), **parts, **more), (floats(BATCH, SEQ, WIDTH),), itself


@entry
def transport_by_sinkhorn() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(self.net(x), self.net(y)) ** 2
        f = cost.new_zeros(cost.shape[0], SEQ)
        for _ in range(5):
            g = -torch.logsumexp(f.unsqueeze(-1) - cost, 1)
            f = -torch.logsumexp(g.unsqueeze(1) - cost, 2)
        return ((f.unsqueeze(-1) + g.unsqueeze(1) - cost).exp() * cost).sum((1, 2)).mean()

    return net_of(run, net=mlp(8, WIDTH, 16)), (floats(BATCH, SEQ, 8), uniform(BATCH, SEQ, 8)), itself


# Representation learning.


@entry
def momentum_contrast() -> tuple[Any, ...]:
    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = mlp(32, WIDTH, 16), mlp(32, WIDTH, 16).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(64, 16), dim=1))
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            q = F.normalize(self.query(one), dim=1)
            with torch.no_grad():
                for a, b in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    b.mul_(0.99).add_(a, alpha=0.01)
                k = F.normalize(self.key(other), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], 1) / 0.1
            with torch.no_grad():
                begin = int(self.at)
                self.queue[begin : begin + BATCH] = k
                self.at[0] = (begin + BATCH) % 64
            return F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long, device=one.device))

    return Moco(), (floats(BATCH, 32), uniform(BATCH, 32)), itself


@entry
def redundancy_reduction() -> tuple[Any, ...]:
    def run(self: Any, one: Tensor, other: Tensor) -> Tensor:
        a, b = (self.norm(self.net(each)) for each in (one, other))
        c = a.t() @ b / one.shape[0]
        diagonal = torch.diagonal(c)
        return (diagonal - 1).square().sum() + 0.005 * (c.square().sum() - diagonal.square().sum())

    net = net_of(run, net=mlp(32, WIDTH, 32), norm=nn.BatchNorm1d(32, affine=False))
    return net, (floats(BATCH * 4, 32), uniform(BATCH * 4, 32)), itself


@entry
def margins_on_a_sphere() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.net(x)), F.normalize(self.centers.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        turned = torch.cos(torch.acos(cosine) + 0.3)
        return F.cross_entropy(16 * torch.where(F.one_hot(label, 8).bool(), turned, cosine), label)

    return (
        net_of(run, net=mlp(32, WIDTH, 16), centers=nn.Linear(16, 8, bias=False)),
        (floats(BATCH, 32), classes()),
        itself,
    )


@entry
def an_inner_step_of_learning() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, y: Tensor, x_new: Tensor, y_new: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, moved, (x_new,)), y_new)

    given = (floats(BATCH, 8), uniform(BATCH, 4), uniform(BATCH, 8), floats(BATCH, 4))
    return net_of(run, net=mlp(8, WIDTH, 4, act=nn.Tanh)), given, itself


@entry
def weight_of_direction_and_length() -> tuple[Any, ...]:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.a = nn.Parameter(torch.randn(8, WIDTH) / 8)
            self.b = nn.Parameter(torch.randn(WIDTH, 8) / 8)
            self.length = nn.Parameter(self.base.weight.detach().norm(dim=1))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.base.weight + self.b @ self.a
            weight = weight * (self.length / weight.norm(dim=1).detach()).unsqueeze(-1)
            return F.linear(x, weight, self.base.bias)

    return nn.Sequential(Adapted(), nn.GELU(), Adapted()), (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def quantized_while_it_trains() -> tuple[Any, ...]:
    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("least", torch.zeros(()))
            self.register_buffer("most", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.least.copy_(0.9 * self.least + 0.1 * x.min())
                self.most.copy_(0.9 * self.most + 0.1 * x.max())
            scale = (self.most - self.least) / 255
            q = ((x - self.least) / scale).round().clamp(0, 255) * scale + self.least
            x = x + (q - x).detach()
            step = self.linear.weight.abs().amax(1, keepdim=True) / 127
            w = self.linear.weight
            return F.linear(x, w + ((w / step).round() * step - w).detach(), self.linear.bias)

    return nn.Sequential(Observed(), nn.ReLU(), Observed()), (floats(BATCH, WIDTH),), mean_square


# Steps that read values.


@entry
def checked_inputs() -> tuple[Any, ...]:
    def run(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
        if ids.max() >= 96 or not torch.isfinite(self.words.weight).all():
            raise ValueError("tokens")
        assert mask.sum(1).min().item() > 0
        x = self.words(ids)
        x = self.net(x if mask.all() else x * mask.unsqueeze(-1))
        return self.head((x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))

    net = net_of(run, words=nn.Embedding(96, WIDTH), net=mlp(WIDTH, 128, WIDTH), head=nn.Linear(WIDTH, 8))
    return net, (tokens(BATCH, SEQ), torch.ones(BATCH, SEQ, dtype=torch.long), classes()), F.cross_entropy


@entry
def scaled_by_a_number_that_is_read() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(F.gelu(h / max(1.0, h.detach().abs().max().item())))

    return net_of(run, first=nn.Linear(WIDTH, 128), second=nn.Linear(128, WIDTH)), (floats(BATCH, WIDTH),), mean_square


@entry
def only_masked_places() -> tuple[Any, ...]:
    def run(self: Any, ids: Tensor, masked: Tensor) -> Tensor:
        h = self.body(self.words(ids))[masked.bool()]
        return F.cross_entropy(self.head(h), ids[masked.bool()])

    net = net_of(run, words=nn.Embedding(96, WIDTH), body=mlp(WIDTH, 128, WIDTH), head=nn.Linear(WIDTH, 96))
    return net, (tokens(BATCH, SEQ), (torch.arange(BATCH * SEQ) % 4 == 0).long().view(BATCH, SEQ)), itself
