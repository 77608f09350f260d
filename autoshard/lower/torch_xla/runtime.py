"""The torch_xla runtime that a plan is lowered to: its devices, and its form of shardings.

torch_xla's `OpSharding` is over a mesh of every device of the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autoshard.errors import LoweringError
from autoshard.lower.devices import device_ids
from autoshard.mesh import Mesh, Spec

PartitionSpec = tuple[str | tuple[str, ...] | None, ...]


def check_runtime(mesh: Mesh) -> None:
    """Turn SPMD on, and refuse a runtime whose number of devices is not that of `mesh`.

    Raises:
        LoweringError: when the number of devices is not the mesh's (torch_xla partitions over all of them or none), or
            when tensors are on a device already and SPMD was off.
    """
    import torch_xla
    import torch_xla.runtime as xr

    devices = xr.global_runtime_device_count()
    shape = "x".join(str(size) for size in mesh.shape)
    kind = xr.device_type() or "XLA"
    if devices < mesh.size:
        hint = " (for a trial run set PJRT_DEVICE=CPU and CPU_NUM_DEVICES before torch_xla is imported)"
        raise LoweringError(
            f"mesh larger than the machine: it has {devices} {kind} devices, the plan's mesh {shape} needs {mesh.size}"
            f"{hint if kind == 'CPU' else ''}"
        )
    if devices > mesh.size:
        raise LoweringError(
            f"mesh smaller than the machine: it has {devices} {kind} devices, the plan's mesh {shape} covers "
            f"{mesh.size}; torch_xla partitions over every device it sees, so plan for {devices} or show it fewer"
        )
    if not xr.is_spmd():
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():
            raise LoweringError(
                "tensors were put on an XLA device before SPMD was on, where they cannot be partitioned; call "
                "torch_xla.runtime.use_spmd() at the start of the program"
            )
        xr.use_spmd()


_LOGICAL: list[bool] = []
"""Not empty inside `logical_devices`. Per process, not per thread: autograd has threads of its own."""


@contextmanager
def logical_devices() -> Iterator[None]:
    """In this context shardings name mesh positions, row-major, instead of the runtime's devices."""
    _LOGICAL.append(True)
    try:
        yield
    finally:
        _LOGICAL.pop()


def xla_mesh(mesh: Mesh) -> Any:
    """The `torch_xla.distributed.spmd.Mesh` of a mesh: the runtime's device at each position.

    Its constructor needs the devices to exist; the shardings it then makes do not (see `retrace`).
    """
    return _xla_mesh(mesh, not _LOGICAL)


@lru_cache(maxsize=16)
def _xla_mesh(mesh: Mesh, attached: bool) -> Any:
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    made = object.__new__(xs.Mesh)
    attributes = xr.global_runtime_device_attributes() if attached else []
    made.device_ids = np.array(device_ids(mesh, attributes))
    made.mesh_shape, made.axis_names = mesh.shape, mesh.axis_names
    return made


def partition_spec(mesh: Mesh, spec: Spec) -> PartitionSpec:
    """A spec in torch_xla's form: per dim None, an axis, or axes major to minor; axes of one device drop out."""
    dims = [tuple(axis for axis in dim if mesh.axis_size(axis) > 1) for dim in spec]
    return tuple(None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims)


def op_sharding(mesh: Mesh, spec: Spec) -> Any:
    """torch_xla's `OpSharding` for a spec (cached by torch_xla's mesh)."""
    return xla_mesh(mesh).get_op_sharding(partition_spec(mesh, spec))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside an `XLAShardedTensor`, which torch_xla's own functions refuse; others unchanged."""
    inner: torch.Tensor = getattr(tensor, "global_tensor", tensor)
    return inner


def shard_data(tensor: torch.Tensor, mesh: Mesh, spec: Spec, what: str) -> None:
    """Shard a tensor that has data (a parameter, buffer, state or input), in place.

    Raises:
        LoweringError: it has another sharding already (torch_xla does not reshard between devices); or it has more than
            `MOST_DIMS` dims and is to be split.
    """
    import torch_xla

    if tensor.dim() > MOST_DIMS:
        if any(spec):
            raise LoweringError(
                f"{what} has {tensor.dim()} dims, and torch_xla splits data of at most {MOST_DIMS}; plan with a hint "
                "that keeps it whole, or reshape it inside the model"
            )
        return

    try:
        torch_xla._XLAC._xla_mark_sharding(plain(tensor), op_sharding(mesh, spec))
    except RuntimeError as error:
        if "Existing annotation" not in str(error):
            raise
        raise LoweringError(
            f"{what} is already sharded, and not as the plan wants it; move it to the CPU and back first"
        ) from None


MOST_DIMS = 5
"""Most dims of a tensor for torch_xla's `OpSharding`, which takes nested lists to this depth."""


def pin(tensor: torch.Tensor, mesh: Mesh, spec: Spec) -> None:
    """Annotate an intermediate, in place: it becomes the result of a `custom_call @Sharding`."""
    import torch_xla

    if tensor.dim() > MOST_DIMS:
        made = annotated_copy(tensor, mesh, spec)
        replace_value(tensor, torch._from_functional_tensor(made) if torch._is_functional_tensor(made) else made)
    else:
        torch_xla._XLAC._xla_annotate_custom_sharding(plain(tensor), op_sharding(mesh, spec))


def annotated_copy(tensor: torch.Tensor, mesh: Mesh, spec: Spec) -> torch.Tensor:
    """A copy of `tensor` with an annotation of its own (also if `tensor` is an argument).

    A tensor of more than `MOST_DIMS` dims is annotated with its unsplit dims merged.
    """
    copy = plain(tensor).clone()
    if copy.dim() <= MOST_DIMS:
        pin(copy, mesh, spec)
        return copy
    order, shape, fewer = fewer_dims(tuple(copy.shape), spec)
    flat = copy.permute(order).reshape(shape).clone()
    pin(flat, mesh, fewer)
    back = sorted(range(len(order)), key=lambda dim: order[dim])
    return flat.reshape([copy.shape[dim] for dim in order]).permute(back).clone()


def fewer_dims(shape: tuple[int, ...], spec: Spec) -> tuple[list[int], list[int], Spec]:
    """Merge the dims of a tensor that are not split.

    Returns:
        A permutation of its dims (the identity where that is enough, else split ones first), the shape with adjacent
        unsplit dims merged, and the spec of that shape.
    """
    for order in (list(range(len(shape))), sorted(range(len(shape)), key=lambda dim: not spec[dim])):
        sizes: list[int] = []
        specs: list[tuple[str, ...]] = []
        for dim in order:
            if specs and not spec[dim] and not specs[-1]:
                sizes[-1] *= shape[dim]
            else:
                sizes.append(shape[dim])
                specs.append(spec[dim])
        if len(sizes) <= MOST_DIMS:
            break
    return order, sizes, tuple(specs)


def replace_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Swap the value of `value` (replaced by a write-back) into `tensor`, and drop the old one."""
    import torch_xla

    if torch._is_functional_tensor(tensor):
        torch._functionalize_replace(tensor, value)
        torch._functionalize_commit_update(tensor)
        torch._functionalize_sync(tensor)
    else:
        torch_xla._XLAC._replace_xla_tensor(tensor, value)
