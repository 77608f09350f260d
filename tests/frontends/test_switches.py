"""Switches compute the numbers that torch computes, forward and backward, and merge no dims."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.frontends.switches import interpolation
from autoshard.frontends.switches import table as switches
from autoshard.frontends.switches.handlers import UNTOUCHED
from autoshard.frontends.switches.losses import histc
from autoshard.frontends.switches.multihead import _mask
from autoshard.frontends.switches.table import DEFAULT, active
from autoshard.frontends.torch_xla.program import capture, prepare_runtime
from autoshard.frontends.tracing import ops
from autoshard.frontends.tracing.sequence import AtenSequence
from tests.conftest import FRONTENDS
from tests.frontends.models import float_reshapes

B, S, H, D, V = 2, 6, 4, 8, 11
IDS = torch.arange(B * S).reshape(B, S) % V
LABELS = torch.where(IDS % 5 == 0, -100, (IDS * 3) % V)
PLACES = torch.tensor([3, 0, 3, 5])
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
NONE_OF_FIRST = CAUSAL & (torch.arange(S) > 0).unsqueeze(1)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


x, w, b = random(B, S, D), random(3 * D, D), random(3 * D)
q, k, v, kv = random(B, H, S, D), random(B, H, S, D), random(B, H, S, D), random(B, 1, S, D)
HEADS = tuple(each * 0.3 for each in (x, w, b, random(D, D)))
image, scale, shift = random(3, D, 5, 5), random(D), random(D)
logits, table = random(B, S, V), random(V, D)


def with_running_statistics(i: torch.Tensor) -> torch.Tensor:
    mean, variance = torch.zeros(D).to(i.device), torch.ones(D).to(i.device)
    out = F.batch_norm(i, mean, variance, training=True, momentum=0.3)
    return out + (mean + variance).view(1, -1, 1, 1)


Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]

PADDED = torch.tensor([[False] * S, [False] * (S - 2) + [True] * 2])


def multihead(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    keys: int = S,
    apart: bool = False,
    **named: Any,
) -> torch.Tensor:
    """`F.multi_head_attention_forward` of x, `(batch, positions, features)`, with masks moved to its device."""
    named = {name: each.to(x.device) if isinstance(each, torch.Tensor) else each for name, each in named.items()}
    query, key = x.transpose(0, 1), x.transpose(0, 1)
    key = key if keys == S else key[:keys] * 2
    value = key + 1 if apart else key
    if apart:
        each = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), w.chunk(3), strict=True))
        named |= {"use_separate_proj_weight": True, **each}
    attended, weights = F.multi_head_attention_forward(
        query if keys == S and not apart else query.clone(), key, value, D, H, None if apart else w, b, None, None,
        False, 0.0, out, None, **named,
    )  # fmt: skip
    return attended if weights is None else torch.cat([attended.flatten(), weights.flatten()])


def set_number(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[y > 0.5] = -1.0
    y[:, 0][(y[:, 0] < 0)] = 3.0
    return y


def written_then_converted(z: torch.Tensor) -> torch.Tensor:
    rows = (z * 1)[:, :-1].reshape(-1, V)
    rows.mul_(2)
    return rows.double().sum(0)


def hooked_then_converted(z: torch.Tensor) -> torch.Tensor:
    rows = z.view(-1, V)
    rows.register_hook(lambda gradient: 2 * gradient)
    assert isinstance(rows.type(), str)
    return rows.double().square().sum(0)


def set_rows(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[y.sum(-1) > 0] = row
    return y


CASES: dict[str, Case] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), (x, w, b)),
    "linear of a matrix": (lambda x, w: F.linear(x[0], w), (x, w)),
    "matmul 4-d": (lambda q, k: q @ k.transpose(-1, -2), (q, k)),
    "matmul broadcasts one operand": (lambda q, k: torch.matmul(q, k.transpose(-1, -2)), (q, kv)),
    "matmul broadcasts the other": (lambda q, k: k @ q.mT, (q, kv)),
    "matmul of 4-d and 3-d": (lambda q, x: q @ x.transpose(-1, -2)[0], (q, x)),
    "matmul of 2-d and 3-d": (lambda w, x: w.matmul(x.transpose(-1, -2)), (w, x)),
    "einsum": (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), (q, k)),
    "einsum with its operands the other way": (lambda x, w: torch.einsum("oi,bsi->bso", w, x), (x, w)),
    "einsum to be transposed": (lambda x, w: torch.einsum("bsi,oi->obs", x, w), (x, w)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (q, k, v)),
    "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)),
    "masked attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL.to(q.device), scale=0.3), (q, k, v),
    ),
    "attention to no key": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=NONE_OF_FIRST.to(q.device)), (q, k, v),
    ),
    "attention to no key by a number": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.zeros(S, S).masked_fill(~NONE_OF_FIRST, -math.inf).to(q.device)
        ), (q, k, v),
    ),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True), (q, k, v),
    ),
    "heads": (partial(multihead, need_weights=False), HEADS),
    "heads and their weights": (multihead, HEADS),
    "heads of other keys": (partial(multihead, keys=4, apart=True, average_attn_weights=False), HEADS),
    "causal heads": (partial(multihead, need_weights=False, attn_mask=~CAUSAL, is_causal=True), HEADS),
    "causal heads, padded": (
        partial(multihead, need_weights=False, attn_mask=~CAUSAL, is_causal=True, key_padding_mask=PADDED), HEADS,
    ),
    "padded heads of fewer keys": (
        partial(multihead, keys=4, key_padding_mask=PADDED[:, 2:], attn_mask=torch.ones(S, 4)), HEADS,
    ),
    "heads with a mask for each": (
        partial(multihead, need_weights=False, attn_mask=torch.linspace(-1, 1, B * H * S * S).view(B * H, S, S)), HEADS,
    ),
    "layer norm": (lambda x, s, t: F.layer_norm(x, (D,), s, t), (x, scale, shift)),
    "layer norm over two dims": (lambda x: F.layer_norm(x, (S, D), eps=1e-3), (x,)),
    "rms norm": (lambda x, s: F.rms_norm(x, (D,), s), (x, scale)),
    "group norm": (lambda i, s, t: F.group_norm(i, 4, s, t), (image, scale, shift)),
    "instance norm": (lambda i, s, t: F.instance_norm(i, weight=s, bias=t), (image, scale, shift)),
    "batch norm": (lambda i, s, t: F.batch_norm(i, None, None, s, t, training=True), (image, scale, shift)),
    "batch norm in eval": (
        lambda i, s: F.batch_norm(i, torch.ones(D).to(i.device), torch.full((D,), 2.0).to(i.device), s), (image, scale),
    ),
    "batch norm with running statistics": (with_running_statistics, (image,)),
    "convolution of groups": (
        lambda i, w: F.conv2d(i, w, torch.arange(12.0).to(i.device), (2, 1), 1, (1, 2), 4),
        (image, random(12, 2, 3, 3)),
    ),
    "transposed convolution of groups": (
        lambda i, w: F.conv_transpose2d(i, w, None, (2, 1), 1, (1, 0), groups=2, dilation=(1, 2)),
        (image, random(image.shape[1], 3, 3, 2)),
    ),
    "transposed convolution of channels": (
        lambda x, w: F.conv_transpose1d(x.mT, w, torch.ones(D, device=x.device), 3, groups=D), (x, random(D, 1, 2)),
    ),
    "transposed convolution of groups with many taps": (
        lambda x, w: F.conv_transpose1d(x.mT, w, stride=2, groups=2), (x, random(D, 2, 40)),
    ),
    "convolution of groups with many taps": (
        lambda x, w: F.conv1d(x.mT, w, padding=20, groups=4), (x, random(D, 2, 40)),
    ),
    "weight norm": (lambda s, t: torch._weight_norm(s, t, 1), (random(D, S), random(1, S))),
    "weight norm of the whole": (lambda s, t: torch._weight_norm(s, t, -1), (random(D, S), random(1, 1))),
    "numbers through a mask": (set_number, (x,)),
    "rows through a mask": (set_rows, (x, random(D))),
    "numbers scattered through a mask": (lambda x, y: x.masked_scatter(y > 0, y * 2), (x, random(*x.shape))),
    "rows scattered through a mask": (
        lambda x, y: x.masked_scatter((x[..., :1] > 0).expand_as(x), y.reshape(-1, y.shape[-1])), (x, random(*x.shape)),
    ),
    "scattered through a mask in place": (
        lambda x, y: (x * 1).masked_scatter_((y[..., :1] > 0).expand(x.shape), y), (x, random(*x.shape)),
    ),
    "slices gathered": (lambda x: x.gather(1, PLACES.to(x.device).view(1, -1, 1).expand(B, -1, D)), (x,)),
    "slices added": (
        lambda x, y: x.scatter_add(-2, PLACES.to(x.device).view(1, -1, 1).expand_as(y), y), (x, random(B, 4, D)),
    ),
    "slices added in place": (
        lambda x: x.new_zeros(B, 3, D).scatter_add_(1, IDS[0].to(x.device).view(-1, 1).expand(B, S, D) % 3, x), (x,),
    ),
    "slices averaged": (
        lambda x, y: x.scatter_reduce(1, PLACES.to(x.device).view(-1, 1).expand(B, -1, D), y, "mean"),
        (x, random(B, 4, D)),
    ),
    "elu": (lambda x: F.elu(x, 0.7), (x,)),
    "elu in place": (lambda x: F.elu(x * 2, inplace=True), (x,)),
    "selu": (lambda x: F.selu(x * 4), (x,)),
    "celu": (lambda x: torch.celu(x, alpha=2.0), (x,)),
    "nearest": (lambda i: F.interpolate(i, scale_factor=2), (image,)),
    "nearest to a size": (lambda i: F.interpolate(i, size=(15, 5), mode="nearest-exact"), (image,)),
    "nearest to an odd size": (lambda i: F.interpolate(i, size=(7, 3)), (image,)),
    "nearest by a fraction": (lambda i: F.interpolate(i, scale_factor=1.5, mode="nearest-exact"), (image,)),
    "nearest to as many": (lambda i: F.interpolate(i, scale_factor=(1.1, 2.1)), (image,)),
    "bicubic to as many": (  # PyTorch's own gradient is that of a copy
        lambda i: F.interpolate(i.detach(), scale_factor=1.1, mode="bicubic") + i, (image,),
    ),
    "bicubic": (lambda i: F.interpolate(i, scale_factor=2, mode="bicubic"), (image,)),
    "bicubic by corners": (
        lambda i: F.interpolate(i, size=(3, 9), mode="bicubic", align_corners=True), (image,),
    ),
    "grid": (lambda i, g: F.grid_sample(i * 0.1, g, align_corners=False), (image, (random(3, 4, 6, 2) / 2).detach())),
    "bilinear": (lambda i: F.interpolate(i, scale_factor=1.5, mode="bilinear"), (image,)),
    "bilinear by corners": (
        lambda i: F.interpolate(i, size=(7, 9), mode="bilinear", align_corners=True), (image,),
    ),
    "bilinear smaller": (lambda i: F.interpolate(i, size=(2, 3), mode="bilinear"), (image,)),
    "cross entropy": (lambda z: F.cross_entropy(z.view(-1, V), LABELS.to(z.device).view(-1)), (logits,)),
    "cross entropy, summed": (
        lambda z: F.cross_entropy(z.reshape(-1, V), LABELS.to(z.device).reshape(-1), reduction="sum"), (logits,),
    ),
    "cross entropy of each": (
        lambda z: F.cross_entropy(z.flatten(0, 1), LABELS.to(z.device).flatten(), reduction="none"), (logits,),
    ),
    "cross entropy ignoring a class": (
        lambda z: F.cross_entropy(z[0], IDS[0].to(z.device), ignore_index=3), (logits,),
    ),
    "smoothed cross entropy": (
        lambda z: F.cross_entropy(z.view(-1, V), LABELS.to(z.device).view(-1), label_smoothing=0.1), (logits,),
    ),
    "smoothed cross entropy ignoring a class": (
        lambda z: F.cross_entropy(z[0], IDS[0].to(z.device), ignore_index=3, label_smoothing=0.2), (logits,),
    ),
    "cross entropy of converted rows": (
        lambda z: F.cross_entropy(z[:, :-1].flatten(0, 1).double(), LABELS[:, 1:].to(z.device).flatten()), (logits,),
    ),
    "rows written to, then converted": (written_then_converted, (logits,)),
    "rows with a hook, then converted": (hooked_then_converted, (logits,)),
    "embedding": (lambda t: F.embedding(IDS.to(t.device), t), (table,)),
    "bags": (lambda t: F.embedding_bag(IDS.to(t.device), t, mode="sum"), (table,)),
    "weighted bags": (
        lambda t, s: F.embedding_bag(IDS.to(t.device), t, mode="sum", per_sample_weights=s), (table, random(B, S)),
    ),
    "bags of means with padding": (lambda t: F.embedding_bag(IDS.to(t.device), t, padding_idx=-2), (table,)),
    "bags by offsets": (
        lambda t: F.embedding_bag(IDS[0].to(t.device), t, torch.tensor([0, 2, 2]).to(t.device), mode="mean"), (table,),
    ),
    "embedding with padding": (lambda t: F.embedding(IDS.to(t.device), t, padding_idx=-2), (table,)),
    "bags of the largest": (lambda t: F.embedding_bag(IDS.to(t.device), t, mode="max"), (table,)),
    "bags of the largest with padding": (
        lambda t: F.embedding_bag(IDS.to(t.device), t, mode="max", padding_idx=-2), (table,),
    ),
    "grid beyond the border": (
        lambda i, g: F.grid_sample(i * 0.1, g, padding_mode="border", align_corners=False), (image, random(3, 4, 6, 2)),
    ),
    "averages to a size": (lambda i: F.adaptive_avg_pool2d(i, (3, 2)), (image,)),
    "averages of a line": (lambda x: F.adaptive_avg_pool1d(x, 3), (x,)),
    "largest to a size": (lambda i: F.adaptive_max_pool2d(i, (3, None)), (image,)),
    "resized by area": (lambda i: F.interpolate(i, size=(3, 2), mode="area"), (image,)),
    "resized by area, by whole windows": (lambda i: F.interpolate(i, size=(2, 2), mode="area"), (image[..., :4, :4],)),
    "multi-margin loss": (lambda z: F.multi_margin_loss(z.flatten(0, 1), LABELS.to(z.device).flatten() % V), (logits,)),
    "squared multi-margin loss": (
        lambda z: F.multi_margin_loss(
            z[0], IDS[0].to(z.device), 2, 0.5, torch.linspace(1, 2, V).to(z.device), reduction="none"
        ), (logits,),
    ),
    "Gaussian likelihood": (lambda x: F.gaussian_nll_loss(x, x.detach() * 2, x.detach().abs(), full=True), (x,)),
    "Gaussian likelihood of small variances": (
        lambda x: F.gaussian_nll_loss(x.detach(), x.detach() * 0, x.abs()), (x,),
    ),
    "distances": (lambda x, y: torch.cdist(x, y), (x, random(B, 5, D))),
    "distances from itself": (lambda x: torch.cdist(x, x), (x,)),
    "distances by the largest": (lambda x, y: torch.cdist(x, y, p=math.inf), (x, random(B, 5, D))),
    "distances of the third power": (lambda x, y: torch.cdist(x, y, p=3.0), (x, random(B, 5, D))),
    "labels of frames": (
        lambda z: F.ctc_loss(
            z.transpose(0, 1).log_softmax(-1), torch.tensor([[1, 1], [2, 3], [4, 1]]).to(z.device),
            torch.tensor([S, S, S - 1]).to(z.device), torch.tensor([2, 1, 0]).to(z.device), reduction="none",
        ), (random(3, S, V),),
    ),
    "labels of frames, on average": (
        lambda z: F.ctc_loss(
            z.transpose(0, 1).log_softmax(-1), torch.tensor([[1, 1], [2, 3], [4, 1]]).to(z.device),
            (S, S, S), (2, 2, 2),
        ), (random(3, S, V),),
    ),
    "spectrogram": (
        lambda x: torch.stft(
            x.flatten(1), 6, 2, window=torch.hann_window(6, device=x.device), return_complex=True
        ).abs(), (x,),
    ),
    "lengths and angles": (lambda x: torch.fft.rfft(x).abs() + torch.fft.rfft(x).angle() + x[..., :1].angle(), (x,)),
    "length of zero": (lambda x: torch.fft.rfft(x * 0).abs(), (x,)),
    "back from a spectrogram": (
        lambda x: torch.istft(
            torch.stft(x.flatten(1), 6, 2, 4, torch.hann_window(4, device=x.device), return_complex=True),
            6, 2, 4, torch.hann_window(4, device=x.device), length=S * D - 1,
        ), (x,),
    ),
    "squares of a dilated window": (
        lambda i: F.max_pool2d(i, (3, 2), (2, 1), (1, 0), (1, 2), ceil_mode=True), (image,),
    ),
    "averages with a ceiling": (
        lambda i: F.avg_pool2d(i, (3, 2), (2, 3), (1, 0), ceil_mode=True, count_include_pad=False), (image,),
    ),
    "averages of windows beyond the image": (lambda i: F.avg_pool2d(i, 1280, ceil_mode=True).mul(i), (image,)),
    "averages of most of the image": (lambda i: F.avg_pool2d(i, (5, 4), 2, 2, ceil_mode=True), (image,)),
    "no elements in place of none": (
        lambda x: x.masked_scatter(torch.zeros_like(x[..., :1]) > 0, x[:0].reshape(-1)).mul(x), (x,),
    ),
    "inverse of a spectrogram by keyword": (
        lambda x: torch.istft(
            input=torch.stft(x.flatten(1), 8, return_complex=True, window=torch.ones(8, device=x.device)),
            n_fft=8, window=torch.ones(8, device=x.device),
        ),
        (x,),
    ),
    "factories that write into a tensor": (
        lambda x: x
        * torch.arange(x.shape[-1], out=torch.empty_like(x[0, 0]))
        * torch.eye(x.shape[-1], out=torch.empty(x.shape[-1], x.shape[-1], device=x.device)).sum(),
        (x,),
    ),
    "averages over padding": (lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True), (x,)),
    "sums with a ceiling": (lambda i: F.avg_pool2d(i, 2, ceil_mode=True, divisor_override=3), (image,)),
    "largest of dilated windows": (lambda x: F.max_pool1d(x, 3, dilation=2), (x,)),
    "largest of equal windows": (lambda x: F.adaptive_max_pool1d(input=x, output_size=D // 2), (x,)),
    "pools by keyword": (
        lambda i: F.max_pool2d(input=i, kernel_size=2, dilation=2)
        + F.avg_pool2d(input=i, kernel_size=3, stride=2, ceil_mode=True).mean()
        + F.adaptive_avg_pool2d(input=i, output_size=2).mean(), (image,),
    ),
    "leaky at the mean slope": (lambda x: F.rrelu(x), (x,)),
    "a product of integers": (
        lambda x: x * torch.einsum("ij,kij->kj", IDS.to(x.device), IDS.to(x.device)[None])[..., :1].unsqueeze(-1), (x,),
    ),
    "pairs of distances": (lambda x: F.pdist(x[0]), (x,)),
    "rows by their frequency": (
        lambda w: F.embedding(IDS.to(w.device) % 3, w, scale_grad_by_freq=True), (table,),
    ),
    "exponential of a matrix": (lambda x: torch.linalg.matrix_exp(x.mT @ x * 0.1), (x,)),
    "a rotation": (lambda a: torch.matrix_exp(a.mT - a), (random(B, D, D),)),
    "reflections": (lambda x, t: torch.linalg.householder_product(x.mT, t[..., 0]), (x * 0.3, x * 0.3)),
    "fewer reflections": (lambda x, t: torch.linalg.householder_product(x.mT, t[:, :3, 0]), (x, x)),
    **{
        f"{reduce} of slices{'' if own else ', without what was there'}": (
            lambda x, y, reduce=reduce, own=own: x.scatter_reduce(
                1, (torch.arange(S, device=x.device) % 3)[:, None].expand(B, S, D), y, reduce, include_self=own
            ), (x, x + 3),
        )
        for reduce, own in [("mean", True), *((each, False) for each in ("sum", "mean", "amax", "amin", "prod"))]
    },
    "mean by index": (
        lambda x, y: x.index_reduce(1, torch.arange(S, device=x.device) % 3, y, "mean", include_self=False), (x, x + 3),
    ),
    **{
        f"volume: {mode}, {padding}, corners {corners}": (
            lambda v, g, how=(mode, padding, corners): F.grid_sample(v, g, *how) + g.mean(),
            (random(2, 3, 4, 5, 6), random(2, 2, 3, 2, 3) * 0.7),
        )
        for mode in ("bilinear", "nearest")
        for padding in ("zeros", "border", "reflection")
        for corners in (True, False)
    },
    "back from a shorter transform": (lambda x: torch.fft.irfft(torch.fft.rfft(x), n=6, norm="ortho"), (x,)),
    "back from a longer transform": (lambda x: torch.fft.irfftn(torch.fft.rfft2(x), s=(S + 2, D + 2)), (x,)),
    "back from both sides": (
        lambda x: torch.istft(
            torch.stft(
                x.flatten(1), 6, 2, 6, torch.ones(6, device=x.device), normalized=True, onesided=False,
                return_complex=True,
            ), 6, 2, 6, torch.ones(6, device=x.device), normalized=True,
        ), (x,),
    ),
    "derivatives of samples": (
        lambda x, w: torch.func.vmap(torch.func.grad(lambda v: F.linear(v, w).square().sum()))(x),
        (x, random(4, D)),
    ),
    "Jacobians forward": (
        lambda x, w: torch.func.vmap(torch.func.jacfwd(lambda v: F.linear(v, w).tanh()))(x[0]), (x, random(4, D)),
    ),
    "Jacobians backward": (
        lambda x, w: torch.func.vmap(torch.func.jacrev(lambda v: F.linear(v, w).tanh()))(x[0]), (x, random(4, D)),
    ),
    "solved": (lambda a, b: torch.linalg.solve(a + 5 * torch.eye(D, device=a.device), b), (random(D, D), random(D, 3))),
    "solved for vectors": (
        lambda a, b: torch.linalg.solve(a + 5 * torch.eye(D, device=a.device), b), (random(B, D, D), random(B, D)),
    ),
    "logarithm of a determinant": (
        lambda a: torch.logdet(a @ a.mT + torch.eye(D, device=a.device)), (random(B, D, D),),
    ),
    "affine grid": (lambda t: F.affine_grid(t, [B, 1, 4, 3], align_corners=False), (random(B, 2, 3),)),
    "affine grid of three dims": (lambda t: F.affine_grid(t, [B, 1, 2, 4, 3], align_corners=True), (random(B, 3, 4),)),
}  # fmt: skip


DECOMPOSED: dict[str, Case] = {
    "means with their dims": (lambda i: i * i.mean((-1, 1), keepdim=True) + i.mean([], True), (image,)),
    "deviations with their dims": (
        lambda i: i.var(2, keepdim=True) + i.std((0, 1), correction=0, keepdim=True),
        (image,),
    ),
    "the largest of all": (lambda x: x * x.amax() - x.amin(keepdim=True), (x,)),
    "of all dims, none named": (
        lambda i: i * i.sum([]) * 0.1 - i.mean([]) + i.var([], correction=0) * torch.linalg.vector_norm(i * 0.1, 2, []),
        (image,),
    ),
    "glu": (lambda x: F.glu(x), (x,)),
    "unfold": (lambda i: F.unfold(i, 3, padding=1, stride=2), (image,)),
    "fold": (lambda x: F.fold(x.mT.reshape(B, D, S), (4, 3), (2, 2)), (x,)),
    "patches": (lambda i: F.unfold(i, (2, 3), dilation=(2, 1), padding=1, stride=(1, 2)), (image,)),
    "windows": (lambda x: x.unfold(1, 3, 2), (x,)),
    "windows side by side": (lambda x: x.unfold(-1, 4, 4), (x,)),
    "shuffled channels": (lambda i: F.channel_shuffle(i, 4), (image,)),
    "logarithm of the gamma function": (lambda x: torch.lgamma(x * 3) + torch.lgamma(x.abs() * 90 + 0.01), (x,)),
    "its derivatives": (lambda x: torch.digamma(x.sigmoid() * 0.4 - 1.7) + torch.polygamma(1, x.abs() + 0.5), (x,)),
    "lowest so far": (lambda x: torch.cummin(x, 1).values, (x,)),
    "hypotenuse": (lambda x: torch.hypot(x, 1 - x), (x,)),
    "signs": (lambda x: torch.copysign(x, x.flip(1)) + x * torch.signbit(-x), (x,)),
    "powers of two": (lambda x: torch.exp2(x) + torch.logaddexp2(x, 1 - x), (x,)),
    "solved by a Cholesky factor": (
        lambda a, b: torch.cholesky_solve(b, a.tril() + 3 * torch.eye(D, device=a.device)),
        (random(B, D, D), random(B, D, 3)),
    ),
    "in steps": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), (x,)),
    "in steps of tensors": (
        lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.tensor(0.1, device=x.device), torch.tensor(3, dtype=torch.int32, device=x.device), -8, 7
        ),
        (x,),
    ),
    "in steps per channel": (
        lambda x: torch.fake_quantize_per_channel_affine(
            x,
            torch.linspace(0.1, 0.3, D, device=x.device),
            torch.zeros(D, dtype=torch.int32, device=x.device),
            2,
            -8,
            7,
        ),
        (x,),
    ),
    "log of a sum": (lambda x: torch.logaddexp(x, 1 - x), (x,)),
    "cross product": (lambda x: torch.linalg.cross(x[..., :3], x[..., 3:6]), (x,)),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), (x,)),
    "pairs": (lambda x: x[:, *torch.triu_indices(S, D, 1, device=x.device)], (x,)),
    "buckets": (lambda x: x * torch.bucketize(x, torch.linspace(-1, 1, 7, device=x.device)), (x,)),
    "huber": (lambda x: F.huber_loss(x, torch.zeros_like(x)), (x,)),
    "huber of another width": (lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="sum", delta=0.3), (x,)),
    "median": (lambda x: torch.median(x) + torch.median(x, 1).values, (x,)),
    "places in order": (
        lambda x: x * torch.searchsorted(torch.linspace(-1, 1, 7, device=x.device), x.detach(), right=True),
        (x,),
    ),
    "places in order of rows": (
        lambda x: x * torch.searchsorted(x.detach().sort(-1).values, x.detach(), side="left"),
        (x,),
    ),
    "logarithms of sums": (lambda x: torch.logcumsumexp(x * 40, 1), (x,)),
    "diagonal": (lambda i: i.diagonal(1, 1, 3), (image,)),
    "diagonal below": (lambda i: i.diagonal(-2, 0, 1), (image,)),
    "written diagonal": (
        lambda i: i.clone().diagonal_scatter(i[:, :, 0].mT * 2, 0, 1, 2).cumsum(0),
        (random(2, 3, 4, 5),),
    ),
    "Cholesky factor": (lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(D, device=a.device)), (random(B, D, D),)),
    "triangle solved": (
        lambda a, b: torch.linalg.solve_triangular(a.tril() + 3 * torch.eye(D, device=a.device), b, upper=False),
        (random(B, D, D), random(B, D, 3)),
    ),
    "triangle solved from the right": (
        lambda a, b: torch.linalg.solve_triangular(
            a.triu() + 3 * torch.eye(D, device=a.device), b, upper=True, left=False
        ),
        (random(D, D), random(B, 3, D)),
    ),
    "gather by keyword": (lambda x: torch.gather(input=x, dim=1, index=x.argsort(1)), (x,)),
    "slices from before the first": (lambda x: x[:, -2 * S :] * torch.slice_scatter(x, x[:, :-1], 1, -3 * S, -1), (x,)),
    "Fourier of real numbers": (lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1, norm="ortho")), (x,)),
    "Fourier there and back": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2j, n=D), (x,)),
    "Fourier to an odd size": (lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) ** 2, n=S, dim=1), (x,)),
    "Fourier of two dims": (lambda x: torch.fft.fft2(x).real + torch.fft.ifft2(x).imag, (x,)),
    "Fourier of two dims, half": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(S, D)), (x,)),
    "pairs of numbers transposed": (lambda x: torch.view_as_real(torch.fft.fft(x)).permute(3, 0, 2, 1), (x,)),
    "transposed into complex numbers": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, -1)).mT.contiguous()) * 2),
        (x,),
    ),
    "turned by angles": (
        lambda x: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(x[..., :4].exp(), x[..., 4:])
        ),
        (x,),
    ),
}


def results(case: Case, device: Any) -> list[torch.Tensor]:
    """Output and gradients of a weighted sum of it."""
    function, operands = case
    moved = [t.detach().to(device).requires_grad_() for t in operands]
    out = function(*moved)
    weights = torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape).to(device)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), moved)]


def save_results_on_xla(path: str) -> None:
    """Every case under all switches, compiled as one program."""
    prepare_runtime()
    import torch_xla

    with active(DEFAULT):
        found = {name: results(case, torch_xla.device()) for name, case in CASES.items()}
        with AtenSequence():
            found |= {name: results(case, torch_xla.device()) for name, case in DECOMPOSED.items()}
    torch_xla.sync()
    torch.save({name: [t.cpu() for t in tensors] for name, tensors in found.items()}, path)


@pytest.fixture(scope="module")
def on_xla(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """What `save_results_on_xla` saves, run in a process of its own.

    In one where other tests have captured and executed before, torch_xla crashed when it handed the results back.
    """
    prepare_runtime()
    torch_xla = pytest.importorskip("torch_xla")
    # The runtime has to be up before this process's first backward pass: autograd counts devices once.
    assert torch_xla._XLAC._xla_num_runtime_devices() > 0
    path = tmp_path_factory.mktemp("switches") / "results.pt"
    code = f"from {__name__} import save_results_on_xla; save_results_on_xla({str(path)!r})"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=600)
    return torch.load(path)


@pytest.mark.parametrize("name", DECOMPOSED)
def test_a_decomposition_computes_what_torch_computes(name: str, on_xla: dict[str, list[torch.Tensor]]) -> None:
    for ours, theirs in zip(on_xla[name], results(DECOMPOSED[name], "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


LACKING = [*CASES][[*CASES].index("bags of the largest") :]
"""What torch_xla computes on the CPU, and a switch does not."""


@pytest.mark.parametrize("name", [*DECOMPOSED, *LACKING])
def test_what_torch_xla_has_no_lowering_of_is_captured(name: str) -> None:
    function, operands = (CASES | DECOMPOSED)[name]
    model = nn.Module()
    model.forward = lambda *given: function(*given).sum()  # type: ignore[method-assign]
    model.register_parameter("w", nn.Parameter(torch.ones(())))
    assert capture(model, tuple(torch.empty_like(t) for t in operands)).ops


def test_a_window_beyond_the_image_is_one_slice() -> None:
    """transformers' EfficientNet averages windows of 1280 x 1280 pixels of images of 7 x 7."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(1280, ceil_mode=True))
    assert len(capture(model, torch.zeros(2, 3, 7, 7)).ops) < 40


@pytest.mark.parametrize("name", CASES)
def test_a_switch_computes_what_torch_computes(name: str, on_xla: dict[str, list[torch.Tensor]]) -> None:
    for ours, theirs in zip(on_xla[name], results(CASES[name], "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_cpu_tensors_are_left_to_torch() -> None:
    with active(DEFAULT):
        assert torch.equal(F.linear(x, w, b), torch._C._nn.linear(x, w, b))


def aten_names(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> list[str]:
    return [op.name for op in capture(model, inputs, **options).ops]


class Layered(nn.Module):
    """Layers under torch_xla's scan_layers, or its scan, or its checkpoint."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(3))
        self.weights = nn.Parameter(torch.linspace(-1, 1, 3 * D).reshape(3, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch_xla.experimental.scan import scan
        from torch_xla.experimental.scan_layers import scan_layers
        from torch_xla.utils.checkpoint import checkpoint

        if self.how == "scan":
            last, each = scan(lambda carry, w: (torch.tanh(carry * w), carry.sum()), x, self.weights)
            return last.sum() + each.sum()
        x = x * self.weights.sum()
        if self.how == "scan_layers":
            return scan_layers(self.layers, x).sum()
        for layer in self.layers:
            x = checkpoint(layer, x)
        return x.sum()


@pytest.mark.parametrize("how", ["scan", "scan_layers", "checkpoint"])
def test_loops_and_checkpoints_train_with_ops_of_their_own(how: str) -> None:
    names = aten_names(Layered(how), torch.empty(B, D), train=True)
    assert names.count("aten.tanh.default") == (6 if how == "checkpoint" else 3)
    if how != "scan":
        # One dot per layer forward (again in the backward pass, where it is computed again), two backward.
        assert names.count("autoshard.einsum.default") == (12 if how == "checkpoint" else 9)
        assert not {"aten.mm.default", "aten.addmm.default", "aten.stack.default"} & set(names)


def test_scan_is_left_as_it_was() -> None:
    from torch_xla.experimental import scan, scan_layers

    before = scan.Scan, scan_layers.scan
    with active(DEFAULT):
        assert scan.Scan is not before[0]
    assert (scan.Scan, scan_layers.scan) == before


def test_multi_head_attention_is_made_of_einsums() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, H, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    names = aten_names(Attend(), torch.empty(B, S, D))
    assert names.count("autoshard.einsum.default") == 4
    assert not {"aten.bmm.default", "aten.mm.default", "aten.addmm.default"} & set(names)


@pytest.mark.parametrize(
    ("query", "mask", "weights", "kept"),
    [
        (torch.bfloat16, torch.float32, False, True),  # of generate_square_subsequent_mask
        (torch.bfloat16, torch.float32, True, False),
        (torch.float32, torch.bfloat16, True, False),
        (torch.float32, torch.bool, True, True),
    ],
)
def test_masks_of_dtypes_that_torch_refuses_are_left_to_it(
    query: torch.dtype, mask: torch.dtype, weights: bool, kept: bool
) -> None:
    asked = SimpleNamespace(
        query=torch.zeros(S, B, D, dtype=query), key=torch.zeros(S, B, D), attn_mask=torch.zeros(S, S, dtype=mask),
        key_padding_mask=None, is_causal=False, need_weights=weights, num_heads=H,
    )  # fmt: skip
    assert (_mask(asked) is not UNTOUCHED) == kept


def test_an_encoder_at_rest_is_captured_with_a_padding_mask() -> None:
    """torch's fast path would look at the mask."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 16, batch_first=True), 1).eval()
    inputs = {"src": torch.empty(B, S, D), "src_key_padding_mask": PADDED}
    names = [op.name for op in capture(encoder, inputs).ops]
    assert names.count("autoshard.einsum.default") >= 4


def test_a_training_step_updates_the_running_statistics_of_batch_norm() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    images = torch.empty(4, 3, 8, 8)
    program = capture(model, images, loss_fn=lambda y: y.square().mean(), optimizer=torch.optim.SGD)
    arguments = [argument.name for argument in program.arguments]
    updated = {arguments[output.updates] for output in program.outputs if output.updates is not None}
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked", "1.weight"} <= updated
    assert b"batch_norm_training" not in program.stablehlo


def test_running_statistics_of_instance_norm_are_those_of_torch() -> None:
    x, weight = torch.randn(4, 6, 5, 3), torch.arange(6.0)
    ours, torchs = ([torch.zeros(6), torch.ones(6)] for _ in range(2))
    expected = F.instance_norm(x, *torchs, weight, None, True, 0.3)
    torch.testing.assert_close(switches._instance_norm(x, *ours, weight, None, True, 0.3), expected)
    torch.testing.assert_close(ours, torchs)
    at_rest = switches._instance_norm(x, *ours, weight, None, False)
    torch.testing.assert_close(at_rest, F.instance_norm(x, *torchs, weight, None, False))


def test_instance_norm_with_running_statistics_is_split_like_any_other() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
    program = capture(model, torch.empty(4, 3, 8, 8), loss_fn=lambda y: y.square().mean(), optimizer=torch.optim.SGD)
    assert b"batch_norm" not in program.stablehlo
    arguments = [argument.name for argument in program.arguments]
    updated = {arguments[output.updates] for output in program.outputs if output.updates is not None}
    assert {"1.running_mean", "1.running_var"} <= updated


@pytest.mark.parametrize("corners", [True, False])
def test_affine_grids_are_off_to_both_sides_alike(corners: bool) -> None:
    """Positions that were all off to one side made the gradient of a map be off by 1.8e-5 of its largest."""
    theta = torch.eye(2, 3).unsqueeze(0)
    made, exact = (interpolation.affine_grid(t, [1, 1, 13, 47], corners) for t in (theta, theta.double()))
    assert made.flip(1, 2).equal(-made)
    torch.testing.assert_close(exact, F.affine_grid(theta.double(), [1, 1, 13, 47], corners))


def test_without_switches_torch_merges_dims() -> None:
    names = aten_names(nn.Linear(D, D), torch.empty(B, S, D), switches=())
    assert "autoshard.einsum.default" not in names


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bert"])
def test_language_models_merge_no_two_dims_that_can_be_split(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2}}.get(
        model_type, {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    )
    if model_type == "llama":
        sizes["num_key_value_heads"] = 1
    config = transformers.AutoConfig.for_model(model_type, vocab_size=50, bos_token_id=1, eos_token_id=1, **sizes)
    with torch.device("meta"):
        auto = transformers.AutoModelForMaskedLM if model_type == "bert" else transformers.AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="eager").train()
        ids = torch.empty(3, 7, dtype=torch.int64)
    program = capture(
        model,
        {"input_ids": ids, "labels": ids.clone()},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    assert getattr(config, "use_cache", True) is True  # off for the capture only
    # Features into heads and back: a dim and its own parts. Batch 3 and sequence 7 stay apart everywhere.
    heads = {((3, 7, 16), (3, 7, 2, 8)), ((3, 7, 2, 8), (3, 7, 16)), ((3, 7, 8), (3, 7, 8))}
    assert float_reshapes(program.stablehlo) <= heads
    assert not {op.name for op in program.ops} & {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}


@given(st.data())
def test_einsum_on_any_device_is_torchs(data: st.DataObject) -> None:
    """Random two-operand einsums in which every index is in two of the three tensors."""
    kinds = data.draw(st.lists(st.sampled_from(["batch", "a", "b", "sum"]), min_size=1, max_size=5))
    letters = "abcde"[: len(kinds)]
    has = {"batch": (1, 1, 1), "a": (1, 0, 1), "b": (0, 1, 1), "sum": (1, 1, 0)}
    parts = []
    for operand in range(3):
        part = [i for i, kind in zip(letters, kinds, strict=True) if has[kind][operand]]
        parts.append("".join(data.draw(st.permutations(part))))
    equation = f"{parts[0]},{parts[1]}->{parts[2]}"
    sizes = dict(zip(letters, (2, 3, 4, 5, 6), strict=False))
    dtype = data.draw(st.sampled_from([torch.float64, torch.complex128]))
    left, right = (torch.randn([sizes[i] for i in part], dtype=dtype).requires_grad_() for part in parts[:2])
    ours, theirs = ops.einsum(equation, left, right), torch.einsum(equation, left, right)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(
        torch.autograd.grad(ours.abs().square().sum(), (left, right)),
        torch.autograd.grad(theirs.abs().square().sum(), (left, right)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_dot_dims_need_no_transpose_for_linear_and_its_gradients() -> None:
    assert ops.dot_dims("bsi,oi->bso") == ((([2], [1]), ([], [])), None)
    assert ops.dot_dims("bhqd,bhkd->bhqk") == ((([3], [3]), ([0, 1], [0, 1])), None)
    assert ops.dot_dims("bsi,bso->oi")[1] == [1, 0]


def test_a_backward_pass_asks_no_switch_what_a_tensor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op's bookkeeping asked for devices and ids through the mode, 15 times: 4 % of a capture."""
    asked: list[Any] = []
    original = switches._Replace.__torch_function__

    def spy(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_autograd_node() is not None:
            asked.append(func)
        return original(mode, func, types, args, kwargs)

    monkeypatch.setattr(switches._Replace, "__torch_function__", spy)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    capture(model, torch.zeros(4, 8), loss_fn=lambda out: out.square().mean(), optimizer=torch.optim.AdamW)
    assert not [func for func in asked if getattr(func, "__name__", "") == "__get__"]


@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0.0, 4.0), (3, -1.0, 2.0), (10, 0.5, 0.75)])
def test_values_are_counted_between_bounds_as_torch_does(bins: int, low: float, high: float) -> None:
    values = torch.cat([torch.linspace(-2, 5, 57), torch.tensor([low, high])])
    assert torch.equal(histc(values, bins, low, high), torch.histc(values, bins, low, high))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_counts_between_bounds_are_captured(frontend: str) -> None:
    class Counts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, 8, 0, 8)

    program = autoshard.capture(Counts(), torch.zeros(32), frontend=frontend)
    assert [output.type.shape for output in program.outputs] == [(8,)]


def test_logits_that_are_flattened_and_then_converted_keep_batch_and_positions_apart() -> None:
    """As losses are often written; transformers converts first."""

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = scores[:, :-1].reshape(-1, scores.shape[-1]).float()
        return F.cross_entropy(flat, labels[:, 1:].reshape(-1), label_smoothing=0.1)

    rows, ids = torch.empty(3, 7, 16, dtype=torch.bfloat16), torch.empty(3, 7, dtype=torch.int64)
    head = nn.Linear(16, 50, dtype=torch.bfloat16)
    program = capture(head, (rows, ids), loss_fn=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert not float_reshapes(program.stablehlo)


@pytest.mark.parametrize(("reduction", "rows"), [("mean", 0), ("sum", 0), ("none", 1)])
def test_a_loss_is_one_sum_of_all_elements(reduction: str, rows: int) -> None:
    """As two, of which a plan annotates the first, XLA:GPU reads a vocabulary's logits twice (6 % of a step)."""

    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(x), labels, reduction=reduction).sum()

    names = aten_names(Loss(D, V), torch.randn(S, D), torch.zeros(S, dtype=torch.int64))
    assert names.count("aten.sum.dim_IntList") == rows
