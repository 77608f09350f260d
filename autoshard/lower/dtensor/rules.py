"""Sharding rules for ops without one in DTensor: aliases share one, pointwise ops split, others run replicated.

Registered through `torch.distributed.tensor.experimental.register_sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from autoshard.lower.dtensor.guard import guard_strategies
from autoshard.lower.dtensor.handlers import install_handlers
from autoshard.plans.value import Plan

_ALIAS_PACKETS = ("alias", "detach", "lift_fresh")
_TABLES = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
_BATCH_NORMS = tuple(f"{name}_batch_norm{end}" for name in ("native", "cudnn", "miopen") for end in ("", "_backward"))
"""Ops that torch runs for batch norms; captured programs have them decomposed."""


def register_missing(plan: Plan) -> list[str]:
    """Register a rule for every op without one in DTensor; the names of the plan's ops that run replicated."""
    _register_own()
    _register_others()
    guard_strategies()
    replicated = []
    for name in sorted({op.name for op in plan.program.ops}):
        packet = name.removeprefix("aten.").partition(".")[0]
        whole = name.startswith("aten.") and any(str(op) == name and op in _whole for op in _overloads(packet))
        writing = any(_has_rule(op) and op not in _whole for op in _overloads(f"{packet}_"))
        if whole and not writing:  # else it is torch_xla's name for the op that writes
            replicated.append(name)
    return replicated


_whole: set[Any] = set()
"""Ops registered to run replicated."""


def _register(op: Any, rule: Any) -> None:
    """Register a rule for an op, replacing DTensor's.

    All arguments enter DTensor's cache key: `register_sharding` hashes only the first `int` and what follows, so that
    two pads of one tensor, or two convolutions, would share a decision.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    getattr(propagator, "op_single_dim_strategy_funcs", {}).pop(op, None)
    DTensor._op_dispatcher._custom_op_handlers.pop(op, None)
    register_sharding(op)(rule)
    named = [each.name for each in op._schema.arguments if each.kwarg_only and "Tensor" not in str(each.type)]
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, named or None, needs_pytree=True)


@cache
def _register_own() -> None:
    """Rules for ops whose rules in DTensor are missing or wrong."""
    aten = torch.ops.aten
    for name in _ALIAS_PACKETS:
        for op in _overloads(name):
            if not _has_rule(op):
                _register(op, _as_it_is)
    # DTensor's own rule (torch 2.9) is for meshes of one dim: on others its result lacks a placement.
    _register(aten.constant_pad_nd.default, _padded)
    # Torch 2.9 takes the spec of a whole tensor for that of what is selected from it, and writes that shape there.
    _register(aten.select.int, _selected)
    if not _is_known(aten.unbind.int):
        _own_unbind()
    # DTensor's handler (torch 2.9 and 2.13) knows two dims of space with a bias alone, and exchanges edges with other
    # processes wherever a convolution pads, also where the batch is split.
    _register(aten.convolution.default, _convolution)
    _register(aten.convolution_backward.default, _convolution_backward)
    for op in (aten.argmax.default, aten.argmin.default):  # torch 2.14 assumes shards of equal size
        _register(op, _position)
    _redistributing_views()
    install_handlers()
    _register(aten.embedding_dense_backward.default, _lookup_backward)
    for name in _BATCH_NORMS:
        for op in _overloads(name):
            if not _is_known(op):
                _register(op, _Whole(op))


@cache
def _register_others() -> None:
    """Register pointwise ops as split like their operands, and others to run replicated."""
    for name in sorted({name.removeprefix("aten::").partition(".")[0] for name in _dispatched() if "aten::" in name}):
        for op in _overloads(name):
            if _has_rule(op) or not _reads_tensors(op) or not _registrable(op):
                continue
            written = [
                each for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write
            ]
            random = torch.Tag.nondeterministic_seeded in op.tags
            if random or any(each.is_out or each is not op._schema.arguments[0] for each in written):
                continue
            if _is_pointwise(op) and len(op._schema.returns) == 1:
                _register(op, _pointwise)
            else:  # one that writes fits replicated tensors, and DTensor refuses it for others
                _register(op, _Whole(op))
                _whole.add(op)


def _is_pointwise(op: Any) -> bool:
    """Whether an op, or the functional form of an in-place one, is tagged pointwise."""
    plain = op._schema.name.partition("::")[2].removesuffix("_")
    others = (each for each in _overloads(plain) if each._overloadname == op._overloadname)
    return any(torch.Tag.pointwise in each.tags for each in (op, *others))


@cache
def _dispatched() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def _overloads(name: str) -> Iterator[Any]:
    """An op's overloads in the dispatcher, without TorchScript's own (`add_.t` in newer torch)."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        if (f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}") in _dispatched():
            yield getattr(packet, overload)


def _reads_tensors(op: Any) -> bool:
    """Whether it can take DTensors; a view's `_copy` occurs in torch_xla only."""
    return torch.Tag.view_copy not in op.tags and any("Tensor" in str(each.type) for each in op._schema.arguments)


def _has_rule(op: Any) -> bool:
    """Whether DTensor has a rule for an op, or decomposes it."""
    return _is_known(op) or op._can_decompose()


def _is_known(op: Any) -> bool:
    propagator = DTensor._op_dispatcher.sharding_propagator
    return (
        op in DTensor._op_dispatcher._custom_op_handlers
        or op == torch.ops.aten._local_scalar_dense.default
        or any(op in getattr(propagator, table, {}) for table in _TABLES)
    )


def _registrable(op: Any) -> bool:
    """Whether a rule can be registered: all tensors read and made are single ones."""
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
    """Dims without padding may be split; `pad` gives pairs from the last dim on."""
    padded = {x.ndim - 1 - i // 2 for i, width in enumerate(pad) if width}
    several = [Replicate(), *(Shard(dim) for dim in range(x.ndim) if dim not in padded)]
    return [([each], [each, None, None]) for each in several]


def _pointwise(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
    """Every dim of the result may be split; operands of size 1 there are replicated."""
    given = (*args, *kwargs.values())
    shapes = [each.shape for each in given if hasattr(each, "tensor_meta")]
    dims = len(torch.broadcast_shapes(*shapes))

    def placed(each: Any, dim: int | None) -> Any:
        if not hasattr(each, "tensor_meta"):
            return None
        own = dim - dims + len(each.shape) if dim is not None else -1
        return Shard(own) if own >= 0 and each.shape[own] != 1 else Replicate()

    whole: list[tuple[list[Any], list[Any]]] = [([Replicate()], [placed(each, None) for each in given])]
    return whole + [([Shard(dim)], [placed(each, dim) for each in given]) for dim in range(dims)]


def _position(x: Any, dim: Any = None, keepdim: bool = False) -> list[tuple[list[Any], list[Any]]]:
    """Argmax or argmin along a dim: the others may be split."""
    others = [None] * 2
    rows: list[tuple[list[Any], list[Any]]] = [([Replicate()], [Replicate(), *others])]
    if dim is not None and x.ndim:
        dim %= x.ndim
        split = (each for each in range(x.ndim) if each != dim)
        rows += [([Shard(each - (each > dim and not keepdim))], [Shard(each), *others]) for each in split]
    return [(made, reads[: 1 + (dim is not None) + keepdim]) for made, reads in rows]


def _selected(x: Any, dim: int, *rest: Any) -> list[tuple[list[Any], list[Any]]]:
    """Every other dim may be split; those after the selected one move up."""
    dim %= x.ndim
    rows: list[tuple[Any, Any]] = [(Replicate(), Replicate()), (Partial(), Partial())]
    rows += [(Shard(d - (d > dim)), Shard(d)) for d in range(x.ndim) if d != dim]
    return [([made], [read, None, *(None for _ in rest)]) for made, read in rows]


def _own_unbind() -> None:
    """`unbind` as selects; torch 2.9 has no rule (`q, k, v = packed`), and none can be registered publicly."""
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def strategy(schema: OpSchema) -> OpStrategy:
        given, *dims = schema.args_schema
        dim = dims[0] if dims else 0
        parts = given.shape[dim]
        rows = [[*made * parts, read[0]] for made, read in _selected(given, dim)]
        found = expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, rows, input_index=parts)
        for each in found.strategies:
            if parts == 1:
                each.output_specs = (each.output_specs,)
        return found

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(torch.ops.aten.unbind.int, strategy, RuntimeSchemaInfo(1))


def _redistributing_views() -> None:
    """Let `_unsafe_view` redistribute: torch 2.9 refuses to merge two split dims (batch and heads, in a matmul)."""
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops._view_ops import register_op_strategy_map

    register_op_strategy_map(torch.ops.aten._unsafe_view.default, torch.Tensor.view, RuntimeSchemaInfo(1))


def _convolution(x: Any, weight: Any, bias: Any, *rest: Any) -> list[tuple[list[Any], list[Any]]]:
    """The batch may be split; or the output features (without groups), or the input features (partial results)."""
    *_, groups = rest
    others = [None] * len(rest)

    def row(out: Any, x: Any, weight: Any, per_feature: Any) -> tuple[list[Any], list[Any]]:
        return [out], [x, weight, None if bias is None else per_feature, *others]

    several = [
        row(Replicate(), Replicate(), Replicate(), Replicate()),
        row(Shard(0), Shard(0), Replicate(), Replicate()),
    ]
    if groups == 1:
        several.append(row(Shard(1), Replicate(), Shard(0), Shard(0)))
        if bias is None:
            several.append(row(Partial(), Shard(1), Shard(1), None))
    return several


def _convolution_backward(
    gradient: Any, x: Any, weight: Any, bias_sizes: Any, *rest: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Like the forward pass: a gradient without the split dim is partial."""
    *_, groups, mask = rest
    others = [None] * (1 + len(rest))

    def row(reads: list[Any], made: list[Any]) -> tuple[list[Any], list[Any]]:
        return [each if wanted else None for each, wanted in zip(made, mask, strict=True)], [*reads, *others]

    whole = Replicate()
    several = [
        row([whole, whole, whole], [whole, whole, whole]),
        row([Shard(0), Shard(0), whole], [Shard(0), Partial(), Partial()]),
    ]
    if groups == 1:
        several.append(row([Shard(1), whole, Shard(0)], [Partial(), Shard(0), Shard(0)]))
        several.append(row([whole, Shard(1), Shard(1)], [Shard(1), Shard(1), whole]))
    return several


def _lookup_backward(
    gradient: Any, indices: Any, rows: Any, padding: Any, by_frequency: bool
) -> list[tuple[list[Any], list[Any]]]:
    """Features may be split; and the indices, which gives partial results, unless gradients are scaled by frequency."""
    others = [None] * 3
    several = [
        ([Replicate()], [Replicate(), Replicate(), *others]),
        ([Shard(1)], [Shard(gradient.ndim - 1), Replicate(), *others]),
    ]
    if not by_frequency:
        several += [([Partial()], [Shard(dim), Shard(dim), *others]) for dim in range(indices.ndim)]
    return several


class _Whole:
    """All operands and results are replicated."""

    def __init__(self, op: Any) -> None:
        self.results = len(op._schema.returns)
        self.names = [argument.name for argument in op._schema.arguments]

    def __call__(self, *args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        for name, each in given.items():
            split = (
                name.startswith("running_") and each is not None and not all(p.is_replicate() for p in each.placements)
            )
            if split:  # they are written in place, and a redistributed copy is elsewhere
                raise NotImplementedError("a batch norm's running statistics are split, and would not be updated")
        reads = [Replicate() if hasattr(each, "tensor_meta") else None for each in (*args, *kwargs.values())]
        wanted = given.get("output_mask", [True] * self.results)
        return [([Replicate() if each else None for each in wanted], reads)]
