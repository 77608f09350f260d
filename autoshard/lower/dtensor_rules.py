"""Sharding rules for ops of a plan's program that DTensor has none for: aliases as they are, others run whole.

Registered through `torch.distributed.tensor.experimental.register_sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from autoshard.plan import Plan

_ALIASES = ("alias", "detach", "lift_fresh")


def register_missing(plan: Plan) -> list[str]:
    """Give every op that the plan's program may run a rule; the names of those that then run whole everywhere."""
    for name in _ALIASES:
        for op in _overloads(name):
            if not _has_rule(op):
                register_sharding(op)(_as_it_is)
    # DTensor's own rule (torch 2.9) is for meshes of one dim: on others its result has one placement too few.
    register_sharding(torch.ops.aten.constant_pad_nd.default)(_padded)
    replicated = []
    for name in sorted({op.name for op in plan.program.ops}):
        namespace, _, rest = name.partition(".")
        if namespace != "aten":
            continue
        packet = rest.partition(".")[0]
        for op in _overloads(packet):
            if str(op) == name and _reads_tensors(op) and not _has_rule(op) and _registrable(op):
                register_sharding(op)(_Whole(op))
                if not any(_has_rule(other) for other in _overloads(f"{packet}_")):  # torch_xla's word for it
                    replicated.append(name)
    return replicated


@cache
def _dispatched() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def _overloads(name: str) -> Iterator[Any]:
    """An op's overloads that the dispatcher has; TorchScript's own (`add_.t` in newer torch) are none."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        if (f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}") in _dispatched():
            yield getattr(packet, overload)


def _reads_tensors(op: Any) -> bool:
    """Whether it can be given DTensors; a view's `_copy` is torch_xla's own word for it."""
    return torch.Tag.view_copy not in op.tags and any("Tensor" in str(each.type) for each in op._schema.arguments)


def _has_rule(op: Any) -> bool:
    """Whether DTensor has a rule for an op, or takes it apart into ops of its own."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_to_rules")
    return any(op in getattr(propagator, table, {}) for table in tables) or op._can_decompose()


def _registrable(op: Any) -> bool:
    """Whether a rule can be given: all that is read and made are single tensors."""
    schema = op._schema
    lists = any(
        "Tensor[]" in str(argument.type) or "List[Tensor" in str(argument.type) for argument in schema.arguments
    )
    return not lists and all(str(result.type) == "Tensor" for result in schema.returns) and bool(schema.returns)


def _as_it_is(x: Any, *rest: Any) -> list[tuple[list[Any], list[Any]]]:
    others = [None] * len(rest)
    several = [Replicate(), Partial(), *(Shard(dim) for dim in range(x.ndim))]
    return [([each], [each, *others]) for each in several]


def _padded(x: Any, pad: Any, value: Any = 0) -> list[tuple[list[Any], list[Any]]]:
    """Dims that are not padded may be split; `pad` gives pairs from the last dim on."""
    padded = {x.ndim - 1 - i // 2 for i, width in enumerate(pad) if width}
    several = [Replicate(), *(Shard(dim) for dim in range(x.ndim) if dim not in padded)]
    return [([each], [each, None, None]) for each in several]


class _Whole:
    """Everything that an op reads and makes is whole on every process."""

    def __init__(self, op: Any) -> None:
        self.results = len(op._schema.returns)

    def __call__(self, *args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        reads = [Replicate() if hasattr(each, "tensor_meta") else None for each in (*args, *kwargs.values())]
        return [([Replicate()] * self.results, reads)]
