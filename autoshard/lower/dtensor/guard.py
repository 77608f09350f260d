"""Guards DTensor's sharding strategies against placements under which they compute wrong results (torch 2.9).

Arguments outside a strategy's valid placements are redistributed first, by DTensor itself:

- `Partial` reaches only ops that are linear in it: `x.sum(0) + 1` would add 1 on every process;
- means of unevenly split dims would be means of the processes' means;
- `max` and `min` along a split dim would give positions within each process's shard;
- `gather` along a dim that several mesh axes split would look for rows in other shards than those that have them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy

_LINEAR = frozenset(
    {
        "_unsafe_view", "alias", "bmm", "clone", "detach", "div", "expand", "mm", "mul", "neg", "permute",
        "select", "slice", "split", "squeeze", "sum", "t", "transpose", "unbind", "unsqueeze", "view", "zero",
        "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
        "new_empty_strided", "rand_like", "randn_like", "is_same_size", "lift_fresh",
    }
)  # fmt: skip
"""Linear ops, or ops that do not depend on values: the result for a sum is the sum of the results."""
_BOTH = frozenset({"add"})
"""Linear if both operands are DTensors; a number would be added on every process."""
_WHOLE_PARAMETERS = {"native_layer_norm_backward": (5, 6), "_fused_rms_norm_backward": (4,)}
"""Positions of parameters that DTensor passes to the kernel without redistribution."""


def guard_strategies() -> None:
    """Guard every strategy registered with DTensor so far, each once."""
    functions = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    for op, strategy in functions.items():
        if not isinstance(strategy, _Guarded):
            functions[op] = _Guarded(op, strategy)


class _Guarded:
    """An op's strategy, evaluated on valid placements."""

    def __init__(self, op: Any, strategy: Callable[[OpSchema], Any]) -> None:
        self.strategy = strategy
        self.name = op._schema.name.partition("::")[2]
        self.writes = self.name.endswith("_") and not self.name.endswith("__")
        self.plain = self.name.removesuffix("_") if self.writes else self.name
        self.positions = self.plain in ("max", "min") and len(op._schema.returns) == 2
        self.whole = _WHOLE_PARAMETERS.get(self.plain, ())

    def __call__(self, schema: OpSchema) -> Any:
        args = tuple(self.guarded(schema, i, each) for i, each in enumerate(schema.args_schema))
        if all(a is b for a, b in zip(args, schema.args_schema, strict=True)):
            return self.strategy(schema)
        return self.strategy(OpSchema(schema.op, args, schema.kwargs_schema, schema.schema_info))

    def guarded(self, schema: OpSchema, position: int, given: Any) -> Any:
        """An argument with placements for which the strategy is valid."""
        if isinstance(given, TupleStrategy):
            children = [self.guarded(schema, position, each) for each in given.children]
            changed = any(a is not b for a, b in zip(children, given.children, strict=True))
            return TupleStrategy(children) if changed else given
        if isinstance(given, list | tuple) and any(isinstance(each, OpStrategy) for each in given):
            return [self.guarded(schema, position, each) for each in given]
        if not isinstance(given, OpStrategy) or len(given.strategies) != 1:
            return given
        spec = given.strategies[0].output_spec
        placements = tuple(
            Replicate() if self.wrong(schema, position, spec, axis) else p for axis, p in enumerate(spec.placements)
        )
        if placements == spec.placements:
            return given
        if self.writes and position == 0:
            raise NotImplementedError(
                f"aten.{self.name} writes into a tensor that is placed {list(spec.placements)}, which would not be"
                " written: use the op that makes a new tensor"
            )
        return OpStrategy([OpSpec(DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta))])

    def wrong(self, schema: OpSchema, position: int, spec: DTensorSpec, axis: int) -> bool:
        """Whether the strategy may compute wrong results for an argument's placement on one mesh axis."""
        placement = spec.placements[axis]
        if position in self.whole:
            return not placement.is_replicate()
        if placement.is_partial():
            return not self.linear(schema, axis)
        if not isinstance(placement, Shard):
            return False
        if self.plain == "mean":
            parts = (spec.mesh.size(i) for i, p in enumerate(spec.placements) if p == placement)
            return bool(spec.shape[placement.dim] % prod(parts))
        if not (self.positions or self.plain == "gather") or position:
            return False
        along = not isinstance(dim := schema.args_schema[1], int) or dim % len(spec.shape) == placement.dim
        return along and (self.positions or spec.placements.count(placement) > 1)

    def linear(self, schema: OpSchema, axis: int) -> bool:
        """Whether `Partial` may reach the op."""
        if self.plain in ("alias", "detach"):
            return True
        for given in schema.args_strategy:
            if not all(_is_sum(each) for each in given.strategies[0].output_spec.placements if each.is_partial()):
                return False  # DTensor treats any partial as any other
        if self.plain == "_to_copy":
            dtype = schema.kwargs_schema.get("dtype")
            return not isinstance(dtype, torch.dtype) or dtype.is_floating_point
        if self.plain in _BOTH:
            both = [each for each in schema.args_schema[:2] if isinstance(each, OpStrategy)]
            kinds = [each.strategies[0].output_spec.placements[axis] for each in both]
            return len(both) == 2 and not any(kind.is_shard() for kind in kinds)  # no shard becomes a partial
        return self.plain in _LINEAR


def _is_sum(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"
