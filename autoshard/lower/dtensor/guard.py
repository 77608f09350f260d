"""DTensor's sharding strategies, kept from placements under which they give wrong numbers (torch 2.9 does, silently).

A strategy is asked for placements that it is right for; what is otherwise is redistributed first, by DTensor itself:

- a sum still to be made (`Partial`) reaches ops alone that are linear in it: `x.sum(0) + 1` adds 1 on every process;
- means of dims that are split unevenly would be means of the processes' means;
- `max` and `min` along a split dim would give positions in each process's part.
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
"""Ops whose result for a sum is the sum of their results, or does not depend on values."""
_BOTH = frozenset({"add"})
"""So too where both operands are DTensors; a number would be added on every process."""
_WHOLE_PARAMETERS = {"native_layer_norm_backward": (5, 6), "_fused_rms_norm_backward": (4,)}
"""The positions of parameters that DTensor hands the kernel as it finds them."""


def guard_strategies() -> None:
    """Guard every strategy that DTensor has now; once more for those that it has since."""
    functions = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    for op, strategy in functions.items():
        if not isinstance(strategy, _Guarded):
            functions[op] = _Guarded(op, strategy)


class _Guarded:
    """An op's strategy, asked about arguments as it is right for them."""

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
        """An argument with the placements that the strategy is right for."""
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
        """Whether the strategy can go wrong with what an argument is on one mesh axis."""
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
        if self.positions and position == 0:
            return not isinstance(dim := schema.args_schema[1], int) or dim % len(spec.shape) == placement.dim
        return False

    def linear(self, schema: OpSchema, axis: int) -> bool:
        """Whether a sum still to be made may reach the op."""
        if self.plain in ("alias", "detach"):
            return True
        for given in schema.args_strategy:
            if not all(_is_sum(each) for each in given.strategies[0].output_spec.placements if each.is_partial()):
                return False  # DTensor takes any of them for any other
        if self.plain == "_to_copy":
            dtype = schema.kwargs_schema.get("dtype")
            return not isinstance(dtype, torch.dtype) or dtype.is_floating_point
        if self.plain in _BOTH:
            both = [each for each in schema.args_schema[:2] if isinstance(each, OpStrategy)]
            kinds = [each.strategies[0].output_spec.placements[axis] for each in both]
            return len(both) == 2 and not any(kind.is_shard() for kind in kinds)  # no part becomes a sum
        return self.plain in _LINEAR


def _is_sum(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"
