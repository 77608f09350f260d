"""More entries of sorts that the rest of the zoo has not: sequences, time series, sound, pictures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.zoo_entry import BATCH, SEQ, WIDTH, classes, entry, floats, mean_square, tokens, uniform
from benchmarks.zoo_held_out import itself, mlp, net_of

# Sequences.


@entry
def retention() -> tuple[Any, ...]:
    def run(self: Any, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (each.view(*ids.shape, 4, 16).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        decay = torch.log(1 - 2.0 ** (-5 - torch.arange(4, device=ids.device, dtype=torch.float32)))
        at = torch.arange(ids.shape[1], device=ids.device)
        apart = (at[:, None] - at[None]).float()
        kept = torch.where(apart >= 0, torch.exp(apart * decay[:, None, None]), 0.0)
        out = self.group((q @ k.transpose(-1, -2) / 4 * kept @ v).transpose(1, 2).reshape(-1, WIDTH)).view_as(x)
        return self.head(x + out * F.silu(self.gate(x))).flatten(0, 1)

    parts = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "gate": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 96)}
    net = net_of(run, words=nn.Embedding(96, WIDTH), norm=nn.LayerNorm(WIDTH), group=nn.GroupNorm(4, WIDTH), **parts)
    return net, (tokens(BATCH, SEQ), tokens(BATCH, SEQ).flatten()), F.cross_entropy


@entry
def selective_scan() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        u = F.silu(self.conv(x.transpose(1, 2))[..., :SEQ]).transpose(1, 2)
        delta = F.softplus(self.delta(u))
        b, c = self.bc(u).chunk(2, -1)
        decay = torch.exp(-delta.unsqueeze(-1) * self.a.weight.exp())
        put = (delta * u).unsqueeze(-1) * b.unsqueeze(2)
        state, outs = torch.zeros_like(put[:, 0]), []
        for t in range(SEQ):
            state = decay[:, t] * state + put[:, t]
            outs.append((state * c[:, t].unsqueeze(1)).sum(-1))
        return torch.stack(outs, 1)

    parts = {"delta": nn.Linear(WIDTH, WIDTH), "bc": nn.Linear(WIDTH, 16), "a": nn.Embedding(WIDTH, 8)}
    return (
        net_of(run, conv=nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH), **parts),
        (floats(BATCH, SEQ, WIDTH),),
        mean_square,
    )


@entry
def packed_sequences() -> tuple[Any, ...]:
    def run(self: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.words(ids)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return self.head(out.sum(1))

    net = net_of(run, words=nn.Embedding(96, 32), cells=nn.GRU(32, 32, batch_first=True), head=nn.Linear(32, 8))
    lengths = torch.full((BATCH,), SEQ)
    return net, (tokens(BATCH, SEQ), lengths, classes()), F.cross_entropy


@entry
def memory_that_is_written() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        memory = self.start.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        h, c = x.new_zeros(x.shape[0], WIDTH), x.new_zeros(x.shape[0], WIDTH)
        read, outs = x.new_zeros(x.shape[0], 16), []
        for t in range(4):
            h, c = self.cell(torch.cat([x[:, t], read], -1), (h, c))
            key, erase, add = self.head(h).chunk(3, -1)
            where = (5 * F.cosine_similarity(memory, key.unsqueeze(1), dim=-1)).softmax(-1).unsqueeze(-1)
            memory = memory * (1 - where * erase.sigmoid().unsqueeze(1)) + where * add.unsqueeze(1)
            read = (where * memory).sum(1)
            outs.append(read)
        return torch.stack(outs, 1)

    net = net_of(run, start=nn.Embedding(8, 16), cell=nn.LSTMCell(24, WIDTH), head=nn.Linear(WIDTH, 48))
    return net, (floats(BATCH, 4, 8),), mean_square


@entry
def relative_shift() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        q, k, v = (each.view(BATCH, SEQ, 4, 16).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        places = self.places.weight.view(-1, 4, 16).permute(1, 2, 0)
        position = q @ places
        position = F.pad(position, (1, 0)).view(BATCH, 4, SEQ + 1, SEQ)[:, :, 1:]
        weights = ((q @ k.transpose(-1, -2) + position) / 4).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    net = net_of(run, qkv=nn.Linear(WIDTH, 3 * WIDTH), places=nn.Embedding(SEQ, WIDTH), out=nn.Linear(WIDTH, WIDTH))
    return net, (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def expert_choice() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        gate, chosen = scores.t().topk(32, -1)
        h = F.gelu(torch.einsum("ekd,edf->ekf", flat[chosen], self.up.view(4, WIDTH, 128)))
        out = torch.einsum("ekf,efd->ekd", h, self.down.view(4, 128, WIDTH)) * gate.unsqueeze(-1)
        return x + torch.zeros_like(flat).index_add(0, chosen.flatten(), out.flatten(0, 1)).view_as(x)

    net = net_of(run, router=nn.Linear(WIDTH, 4))
    net.up, net.down = (nn.Parameter(torch.randn(*shape) / 8) for shape in ((4 * WIDTH, 128), (4 * 128, WIDTH)))
    return net, (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def time_series_by_blocks() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        forecast = x.new_zeros(x.shape[0], 8)
        for block in self.blocks:
            back, ahead = block(x).split([32, 8], -1)
            x, forecast = x - back, forecast + ahead
        return forecast

    net = net_of(run, blocks=nn.ModuleList(mlp(32, WIDTH, WIDTH, 40, act=nn.ReLU) for _ in range(3)))
    return net, (floats(BATCH * 2, 32), uniform(BATCH * 2, 8)), F.l1_loss


@entry
def delays_by_correlation() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        spectrum = torch.fft.rfft(q, dim=1) * torch.fft.rfft(k, dim=1).conj()
        fit = torch.fft.irfft(spectrum, n=SEQ, dim=1).mean(-1)
        weight, delay = fit.topk(3, -1)
        at = (torch.arange(SEQ, device=x.device)[None, :, None] + delay[:, None]) % SEQ
        moved = torch.gather(v.unsqueeze(2).expand(-1, -1, 3, -1), 1, at.unsqueeze(-1).expand(-1, -1, -1, v.shape[-1]))
        return (moved * weight.softmax(-1)[:, None, :, None]).sum(2)

    return net_of(run, qkv=nn.Linear(WIDTH, 3 * WIDTH)), (floats(BATCH, SEQ, WIDTH),), mean_square


# Sound and pictures.


@entry
def spectrograms() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        window = torch.hann_window(32, device=x.device)
        found = torch.stft(x, 32, 16, window=window, return_complex=True)
        power = torch.log(found.real**2 + found.imag**2 + 1e-5)
        return self.head(self.net(power.unsqueeze(1)).mean((2, 3)))

    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2))
    return net_of(run, net=net, head=nn.Linear(32, 8)), (floats(BATCH, 256), classes()), F.cross_entropy


@entry
def conformer_block() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = F.glu(self.gate(x.transpose(1, 2)), 1)
        x = x + self.out(F.silu(self.batch(self.depth(h)))).transpose(1, 2)
        return self.last(x + 0.5 * self.after(x))

    parts = {"gate": nn.Conv1d(WIDTH, 2 * WIDTH, 1), "depth": nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)}
    more = {"batch": nn.BatchNorm1d(WIDTH), "out": nn.Conv1d(WIDTH, WIDTH, 1), "last": nn.LayerNorm(WIDTH)}
    feeds = {
        name: nn.Sequential(nn.LayerNorm(WIDTH), mlp(WIDTH, 128, WIDTH, act=nn.SiLU)) for name in ("before", "after")
    }
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    return (
        net_of(run, attention=attention, norm=nn.LayerNorm(WIDTH), **parts, **more, **feeds),
        (floats(BATCH, SEQ, WIDTH),),
        mean_square,
    )


@entry
def capsules() -> tuple[Any, ...]:
    def squash(x: Tensor) -> Tensor:
        size = x.square().sum(-1, keepdim=True)
        return size / (1 + size) * x / (size + 1e-8).sqrt()

    def run(self: Any, x: Tensor, label: Tensor) -> Tensor:
        u = squash(self.enter(x).flatten(1).view(BATCH, -1, 8))
        votes = torch.einsum("bni,njio->bnjo", u, self.votes)
        logits = torch.zeros(BATCH, votes.shape[1], 8, device=x.device)
        for _ in range(2):
            v = squash((logits.softmax(-1).unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * v.unsqueeze(1)).sum(-1).detach()
        length, hot = v.norm(dim=-1), F.one_hot(label, 8).float()
        return (hot * F.relu(0.9 - length) ** 2 + 0.5 * (1 - hot) * F.relu(length - 0.1) ** 2).sum(1).mean()

    net = net_of(run, enter=nn.Conv2d(1, 16, 5, stride=3))
    net.votes = nn.Parameter(torch.randn(32, 8, 8, 8) * 0.1)
    return net, (floats(BATCH, 1, 14, 14), classes()), itself


@entry
def pyramids_of_features() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        a = F.relu(self.first(x))
        b = F.relu(self.second(a))
        c = F.relu(self.third(b))
        top = self.side3(c)
        middle = self.side2(b) + F.interpolate(top, size=b.shape[-2:], mode="nearest")
        low = self.side1(a) + F.interpolate(middle, size=a.shape[-2:], mode="bilinear", align_corners=False)
        return sum(self.head(each).mean((2, 3)) for each in (top, middle, low))

    downs = {n: nn.Conv2d(i, o, 3, 2, 1) for n, i, o in (("first", 3, 16), ("second", 16, 32), ("third", 32, 64))}
    sides = {n: nn.Conv2d(i, 16, 1) for n, i in (("side1", 16), ("side2", 32), ("side3", 64))}
    return (
        net_of(run, head=nn.Conv2d(16, 8, 3, padding=1), **downs, **sides),
        (floats(BATCH, 3, 32, 32), classes()),
        F.cross_entropy,
    )


@entry
def boxes_by_overlap() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor, boxes: Tensor, label: Tensor) -> Tensor:
        scores, found = self.head(self.net(x).flatten(2).transpose(1, 2)).split([9, 4], -1)
        found = found.sigmoid()
        low, high = (
            torch.max(found[..., :2], boxes[..., :2]),
            torch.min(found[..., :2] + found[..., 2:], boxes[..., :2] + boxes[..., 2:]),
        )
        shared = (high - low).clamp(min=0).prod(-1)
        union = found[..., 2:].prod(-1) + boxes[..., 2:].prod(-1) - shared
        there = label > 0
        overlap = (1 - shared / union.clamp(min=1e-6))[there].mean()
        return overlap + F.cross_entropy(scores.flatten(0, 1), label.flatten())

    net = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.ReLU(), nn.Conv2d(32, WIDTH, 2, stride=2))
    given = (floats(BATCH, 3, 32, 32), uniform(BATCH, 16, 4), tokens(BATCH, 16, below=9, least=0))
    return net_of(run, net=net, head=nn.Linear(WIDTH, 13)), given, itself


@entry
def squeezed_inverted_bottleneck() -> tuple[Any, ...]:
    def run(self: Any, x: Tensor) -> Tensor:
        h = F.silu(self.bn1(self.expand(self.stem(x))))
        h = F.silu(self.bn2(self.depth(h)))
        h = h * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(h, 1)))))
        return self.head(self.bn3(self.project(h)).mean((2, 3)))

    convs = {"stem": nn.Conv2d(3, 16, 3, 2, 1), "expand": nn.Conv2d(16, WIDTH, 1, bias=False)}
    more = {"depth": nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False), "down": nn.Conv2d(WIDTH, 8, 1)}
    last = {"up": nn.Conv2d(8, WIDTH, 1), "project": nn.Conv2d(WIDTH, 32, 1, bias=False), "head": nn.Linear(32, 8)}
    norms = {"bn1": nn.BatchNorm2d(WIDTH), "bn2": nn.BatchNorm2d(WIDTH), "bn3": nn.BatchNorm2d(32)}
    return net_of(run, **convs, **more, **last, **norms), (floats(BATCH, 3, 32, 32), classes()), F.cross_entropy
