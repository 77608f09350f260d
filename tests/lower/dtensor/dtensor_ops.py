"""Ops of which DTensor's own rules give wrong numbers or none, run on DTensors of four processes and on one process."""

from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.functional import avg_pool2d, cross_entropy, max_pool2d, pad, scaled_dot_product_attention, softplus

from autoshard.lower.dtensor.errors import RefusedOpError, say_where
from autoshard.lower.dtensor.modules import placed
from autoshard.lower.dtensor.rules import register_missing

WHOLE = (Replicate(), Replicate())
SPLIT = {"rows": (Shard(0), Shard(0)), "dims": (Shard(0), Shard(1)), "last": (Replicate(), Shard(-1))}


def labels(shape, classes=6):
    """The first row's are ignored, so that processes have unequal numbers of those that count."""
    made = torch.arange(torch.Size(shape).numel()).view(shape) % classes
    made[: shape[0] // 2 - 1] = -100
    return made


def mask():
    made = torch.arange(4 * 6 * 6).view(4, 1, 6, 6) % 3 > 0
    made[..., 0] = True
    return made


CASES = {
    "a number added to a sum": ((8, 4, 6), lambda x: x.sum(0) + 1.5),
    "sums and means joined": ((8, 4, 6), lambda x: torch.cat((x.sum(0), x.mean(0)), 0)),
    "a sum and a mean added": ((8, 4, 6), lambda x: x.sum(0) + x.mean(0)),
    "a sum and a part added": ((4, 4, 6), lambda x: x.sum(0) + x[0] + x.sum(1)),
    "means of unequal parts": ((5, 3, 6), lambda x: x.mean((0, 1)) + x.mean()),
    "largest along a dim": ((8, 4, 6), lambda x: x.max(0).values + x.max(1).values.sum(0)),
    "where the largest is": ((5, 3, 6), lambda x: x + x.argmax(0) + x.argmax(1, keepdim=True)),
    "gathered along a dim": ((8, 4, 6), lambda x: x.gather(0, torch.arange(192).view(8, 4, 6) * 5 % 8)),
    "two pads of one shape": ((8, 4, 6), lambda x: pad(x, (1, 0, 0, 0))[..., 1:] + pad(x, (0, 0, 1, 0))[:, 1:]),
    "ignored labels": ((8, 6), lambda x: cross_entropy(x, labels((8,)))),
    "ignored labels of pixels": ((8, 6, 2, 2), lambda x: cross_entropy(x, labels((8, 2, 2)))),
    "weighed labels": ((8, 6), lambda x: cross_entropy(x, labels((8,)), weight=torch.arange(1.0, 7.0))),
    "attention under a mask": ((4, 4, 6, 8), lambda x: scaled_dot_product_attention(x, x, x, mask())),
    "a mask as keyword": ((4, 4, 6, 8), lambda x: scaled_dot_product_attention(x, x, x, attn_mask=mask()[0, 0])),
    "shared keys": (
        (4, 4, 6, 8),
        lambda x: scaled_dot_product_attention(x, x[:, :2] * 1, x[:, 2:] * 1, is_causal=True, enable_gqa=True),
    ),
    "pooling": ((8, 6, 4, 4), lambda x: max_pool2d(x, 2) + avg_pool2d(x, 2)),
    "pointwise ops without a rule": ((8, 4, 6), lambda x: softplus(x).masked_fill_(x > 1, 0.5)),
}  # fmt: skip


def differences(mesh):
    """Case and placement -> by how much results and gradients differ, or why it does not run."""
    register_missing(SimpleNamespace(program=SimpleNamespace(ops=())))
    found = {}
    for case, (shape, function) in CASES.items():
        given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        alone = given.clone().requires_grad_()
        wanted = function(alone)
        weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
        (wanted * weights).sum().backward()
        for kind, placements in SPLIT.items():
            placements = [Shard(p.dim % len(shape)) if isinstance(p, Shard) else p for p in placements]
            split = distribute_tensor(given.clone(), mesh, placements).requires_grad_()
            with implicit_replication():
                made = function(split)
                made = placed(made, WHOLE).to_local() if isinstance(made, DTensor) else made
                (made * weights).sum().backward()
            of_value = float((made - wanted).abs().max() / wanted.abs().max())
            of_gradient = float((split.grad.full_tensor() - alone.grad).abs().max() / alone.grad.abs().max())
            found[f"{case}, {kind}"] = max(of_value, of_gradient)
    return found


WRITES = {
    "rows": lambda x: x[1:3].add_(1.0),
    "a column": lambda x: x[:, 1:2].fill_(5.0),
    "the diagonal": lambda x: x.diagonal().mul_(3.0),
    "windows": lambda x: x.unfold(0, 2, 2).mul_(2.0),
    "a flat part": lambda x: x.view(-1)[3:9].zero_(),
    "another's rows": lambda x: x.narrow(0, 4, 2).copy_(x.detach()[:2] * 2.0),
    "a turned row": lambda x: x.t()[0].add_(1.0),
    "all, seen otherwise": lambda x: x.unsqueeze(0).mul_(3.0),
}


def written(mesh):
    """Write and placement -> whether the tensor has what one process writes into it, or why it is refused."""
    say_where(torch.nn.Identity())
    found = {}
    for case, write in WRITES.items():
        wanted = torch.arange(48.0).view(8, 6)
        write(wanted)
        for kind, placements in {**SPLIT, "whole": WHOLE}.items():
            placements = [Shard(p.dim % 2) if isinstance(p, Shard) else p for p in placements]
            made = distribute_tensor(torch.arange(48.0).view(8, 6), mesh, placements)
            try:
                with implicit_replication():
                    write(made)
                found[f"{case}, {kind}"] = bool(torch.equal(made.full_tensor(), wanted))
            except RefusedOpError as error:
                found[f"{case}, {kind}"] = str(error)
    return found
