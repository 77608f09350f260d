"""Custom DTensor op handlers: they choose placements and run the op on each process's shard.

Sharding rules do not suffice for these: DTensor redistributes positional arguments only, unlike an attention mask; and
a lookup in a split table keeps a mask with its result, which no placement on a second mesh axis fits.

No function here is in a reference cycle (a closure that calls itself): Python's collector empties DTensors held by such
a cycle, even when the backward pass still needs them (torch 2.9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Placements = Sequence[Placement]


def install_handlers() -> None:
    """Register the handlers with DTensor."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.embedding.default] = _lookup
    for op in (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default):
        handlers[op] = _label_loss
    for end, handler in (("", _attention), ("_backward", _attention_backward)):
        handlers[getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}").default] = handler


def _attention(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Attention on CPUs."""
    query, key, value, *rest = args
    split = _Split.of(query, key, value)
    output, sums = op(split.read(query), split.read(key), split.read(value), *rest, **split.read_all(kwargs))
    shape = torch.Size((*query.shape[:-1], value.shape[-1]))
    return _global(output, split.mesh, split.placements, shape), _global(sums, split.mesh, split.placements, shape[:-1])


def _attention_backward(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Its backward pass, split like the forward pass."""
    given = args[1:4]
    split = _Split.of(*given)
    made = op(*(split.read(each) for each in args), **split.read_all(kwargs))
    return tuple(_global(part, split.mesh, split.placements, of.shape) for part, of in zip(made, given, strict=True))


@dataclass(frozen=True)
class _Split:
    """The sharding of an attention: by batch and heads."""

    mesh: DeviceMesh
    placements: Placements

    @classmethod
    def of(cls, query: Any, key: Any, value: Any) -> _Split:
        """From the arguments' placements; query heads that share a key head stay together."""
        given = [each for each in (query, key, value) if isinstance(each, DTensor)]
        mesh = given[0].device_mesh
        chosen: list[Placement] = [Replicate()] * mesh.ndim
        for axis in range(mesh.ndim):
            for each in given:
                placement = each.placements[axis]
                if isinstance(placement, Shard) and placement.dim in (0, 1):
                    dim, parts = placement.dim, [i for i in range(axis) if chosen[i] == placement]
                    parts = [mesh.size(i) for i in (*parts, axis)]
                    alike = query.shape[dim] == key.shape[dim] == value.shape[dim]
                    grouped = key.shape[dim] == value.shape[dim] and key.shape[dim] % prod(parts) == 0
                    if alike or grouped:
                        chosen[axis] = Shard(dim)
                        break
        return cls(mesh, chosen)

    def read(self, given: Any) -> Any:
        """This process's shard of an argument of four dims, or three (sums over the last)."""
        return _local(given, self.mesh, self.placements) if isinstance(given, torch.Tensor) else given

    def read_all(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Shards of keyword arguments."""
        return {name: self.read_mask(each) if name == "attn_mask" else each for name, each in given.items()}

    def read_mask(self, mask: Any) -> Any:
        """Shard of a mask, which broadcasts: aligned to the last dims, of size 1 where shared."""
        if mask is None:
            return None
        missing = 4 - mask.ndim
        own: list[Placement] = []
        for placement in self.placements:
            dim = placement.dim - missing if isinstance(placement, Shard) else -1
            own.append(Shard(dim) if dim >= 0 and mask.shape[dim] != 1 else Replicate())
        return _local(mask, self.mesh, own)


_MEAN, _SUM = 1, 2
"""`at::Reduction`."""


def _label_loss(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Cross-entropy on labels: the global mean is the sum over all processes over the sum of counted labels' weights.

    DTensor (torch 2.9) averages the processes' means, although their numbers of counted labels differ.
    """
    scores, labels, weight, reduction, ignored = args
    mesh = next(each.device_mesh for each in (scores, labels) if isinstance(each, DTensor))
    scores, labels = _as_dtensor(scores, mesh), _as_dtensor(labels, mesh)
    classes = 1 if scores.ndim > 1 else 0
    split = [p if isinstance(p, Shard) and p.dim != classes else Replicate() for p in scores.placements]
    of_labels = [Shard(p.dim - (p.dim > classes)) if isinstance(p, Shard) else p for p in split]
    read = _local(scores, mesh, split), _local(labels, mesh, of_labels)
    whole: Placements = [Replicate()] * mesh.ndim
    weights = None if weight is None else _local(weight, mesh, whole)
    loss, total = op(*read, weights, _SUM if reduction == _MEAN else reduction, ignored, **kwargs)
    parts: Placements = [Partial() if isinstance(p, Shard) else p for p in split]
    number = torch.Size(())
    totals = _global(total, mesh, parts, number).redistribute(placements=whole)
    if reduction == _MEAN:
        summed = _local(_global(loss, mesh, parts, number), mesh, whole)
        return _global(summed / totals.to_local(), mesh, whole, number), totals
    if reduction == _SUM:
        return _global(loss, mesh, parts, number), totals
    return _global(loss, mesh, of_labels, labels.shape), totals


def _lookup(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Embedding lookup: split like the indices, else like the table; tables split by rows give partial results."""
    table, indices, *rest = args
    mesh = next(each.device_mesh for each in (table, indices) if isinstance(each, DTensor))
    table, indices = _as_dtensor(table, mesh), _as_dtensor(indices, mesh)
    reads = [_lookup_axis(*pair, indices.ndim) for pair in zip(table.placements, indices.placements, strict=True)]
    of_table, of_indices, made = zip(*reads, strict=True)
    rows, at = _local(table, mesh, of_table), _local(indices, mesh, of_indices)
    if Shard(0) in of_table:
        _, (start, _) = compute_local_shape_and_global_offset(table.shape, mesh, of_table)
        at = at - start
        outside = (at < 0) | (at >= len(rows))
        rows = rows if len(rows) else rows.new_zeros(1, rows.shape[1])
        found = op(rows, at.masked_fill(outside, 0), *rest, **kwargs).masked_fill(outside.unsqueeze(-1), 0)
    else:
        found = op(rows, at, *rest, **kwargs)
    return _global(found, mesh, made, torch.Size((*indices.shape, table.shape[1])))


def _lookup_axis(row: Placement, index: Placement, dims: int) -> tuple[Placement, Placement, Placement]:
    """Placements of table, indices and result on one mesh axis."""
    if isinstance(index, Shard):
        return Replicate(), Shard(index.dim), Shard(index.dim)
    if isinstance(row, Shard):
        return Shard(row.dim), Replicate(), Partial() if row.dim == 0 else Shard(dims)
    return Replicate(), Replicate(), Replicate()


def _as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor counts as replicated."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _local(tensor: torch.Tensor, mesh: DeviceMesh, wanted: Placements) -> torch.Tensor:
    return _as_dtensor(tensor.detach(), mesh).redistribute(placements=wanted).to_local()


def _global(part: torch.Tensor, mesh: DeviceMesh, split: Placements, shape: torch.Size) -> DTensor:
    """This process's shard of a result as a DTensor, dims in the same memory order."""
    order = sorted(range(part.ndim), key=lambda dim: -part.stride(dim))
    inner = torch.empty([shape[dim] for dim in order], device="meta")
    stride = inner.permute([order.index(dim) for dim in range(part.ndim)]).stride()
    return DTensor.from_local(part, mesh, split, run_check=False, shape=shape, stride=stride)
