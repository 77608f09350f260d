"""The sharding of a model's tensors before there is a plan: split evenly."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from autoshard.errors import LoweringError
from autoshard.lower.torch_xla import place, runtime
from autoshard.plans.value import Plan


def split_evenly(model: torch.nn.Module) -> None:
    """Move a model's parameters and buffers to the devices, each split on its longest dim that divides evenly.

    So no step needs the full model on one device. Sharded tensors stay as they are. Buffers of 64-bit integers are
    replicated: they are indices (positions), and XLA aborts on a scatter with unevenly split indices, as slicing split
    ones gives.

    Raises:
        LoweringError: a model without weights.
    """
    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(list(range(count)), (count,), ("all",))
    with place.free_of_weak_references(model):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise LoweringError("the model has no weights (it is on meta): initialize it before it is distributed")
            if tensor.device.type == "xla" and torch_xla._XLAC._get_xla_sharding_spec(runtime.plain(tensor)):
                continue
            dims = [dim for dim, size in enumerate(tensor.shape) if size % count == 0 and size > 0]
            spec: list[Any] = [None] * tensor.dim()
            if dims and tensor.dtype != torch.int64:
                spec[max(dims, key=lambda dim: tensor.shape[dim])] = "all"
            if tensor.device.type == "xla":
                torch_xla._XLAC._xla_mark_sharding(runtime.plain(tensor), mesh.get_op_sharding(tuple(spec)))
                continue
            moved = tensor.detach().to("xla")
            torch_xla._XLAC._xla_mark_sharding(runtime.plain(moved), mesh.get_op_sharding(tuple(spec)))
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
            place.swap(name, tensor, moved)


def unsplit(model: torch.nn.Module, optimizer: Any, plan: Plan) -> None:
    """Fetch sharded tensors to the host: torch_xla does not reshard between devices."""
    arguments = {**plan.parameters, **plan.buffers, **plan.optimizer_state}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors += [(name, value) for name, _, _, value in place.states(model, optimizer)]
    for name, tensor in tensors:
        if tensor.device.type != "xla" or name not in arguments:
            continue
        if torch_xla._XLAC._get_xla_sharding_spec(runtime.plain(tensor)):
            fresh = runtime.plain(tensor.detach()).cpu().to("xla")
            inner = torch._from_functional_tensor(fresh) if torch._is_functional_tensor(fresh) else fresh
            runtime.replace_value(runtime.plain(tensor), inner)
