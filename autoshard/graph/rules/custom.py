"""Rules of custom calls, by target: those that XLA's frontends emit, and those that users register."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.graph.ops import Rule
from autoshard.graph.rules.base import (
    CUSTOM_CALL_RULES,
    Dim,
    Factors,
    RuleFunction,
    Shape,
    Signature,
    custom_call_rule,
    find_rule,
    gathered,
)

_WHOLE, _REST = "*", "..."


def register_rule(
    target: str, dims: str | None = None, *, whole: str = "", sums: str = "", partitioned: bool = True
) -> Any:
    """Define the sharding rule of `stablehlo.custom_call @target`.

        autoshard.register_rule("my_attention", "b h q d, b h k d, b h k d -> b h q d", whole="q k d")
        autoshard.register_rule("my_norm", "... d, d -> ... d", whole="d")

    Operands before the arrow, results after it; per tensor the names of its dims. A name is one loop of the op: dims
    of one name are split together. `...` are any leading dims, `*` is a replicated tensor of any rank.

    Without `dims` this is a decorator of a function from `Signature` to `Rule`, or to None for a form of the op that it
    cannot describe (see `autoshard/graph/rules/base.py`).

    Args:
        target: the call's target; an existing rule is replaced.
        dims: the names of the dims.
        whole: names, separated by spaces, of dims that may not be split.
        sums: names that the op sums over: splitting them leaves every result a partial sum.
        partitioned: whether the runtime's XLA has a partitioner for the call (jax's `custom_partitioning`, a
            `CustomCallPartitioner`). If False, XLA gathers the operands, and the plan names the call with the cost.

    Raises:
        ValueError: the names do not match; says which.
    """
    if dims is None:

        def register(function: RuleFunction) -> RuleFunction:
            return custom_call_rule(target)(_or_gathered(function, partitioned))

        return register
    function = _Named.parse(dims, whole.split(), sums.split())
    custom_call_rule(target)(_or_gathered(function, partitioned))
    return None


def forget_rule(target: str) -> None:
    """Remove the rule of a custom call; nothing if it has none."""
    CUSTOM_CALL_RULES.pop(target, None)
    find_rule.cache_clear()


def _or_gathered(function: RuleFunction, partitioned: bool) -> RuleFunction:
    return function if partitioned else lambda op: gathered(op) if function(op) is not None else None


@dataclass(frozen=True)
class _Named:
    """A rule in names; callable as a rule function."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    sums: frozenset[str]

    @classmethod
    def parse(cls, dims: str, whole: Iterable[str], sums: Iterable[str]) -> _Named:
        before, arrow, after = dims.partition("->")
        if not arrow:
            raise ValueError(f"{dims!r}: the operands' dims, an arrow ->, the results' dims are needed")
        operands, results = (tuple(tuple(each.split()) for each in side.split(",")) for side in (before, after))
        made = cls(operands, results, frozenset(whole), frozenset(sums))
        known = {name for tensor in (*operands, *results) for name in tensor} - {_WHOLE}
        returned = {name for tensor in results for name in tensor}
        for tensor in (*operands, *results):
            if len(set(tensor)) != len(tensor):
                raise ValueError(f"{dims!r}: {' '.join(tensor)} has one name twice")
            if (_REST in tensor[1:]) or (_WHOLE in tensor and len(tensor) > 1):
                raise ValueError(f"{dims!r}: {_REST} comes first, and {_WHOLE} stands alone")
        for name in sorted((made.whole | made.sums) - known):
            raise ValueError(f"{dims!r}: no tensor has a dim {name}")
        for name in sorted(made.sums & (returned | made.whole)):
            raise ValueError(f"{dims!r}: {name} cannot be summed over and be kept too")
        for name in sorted(known - returned - made.whole - made.sums):
            raise ValueError(
                f"{dims!r}: no result has the dim {name}: name it in whole=, or in sums= if it is added up"
            )
        return made

    def __call__(self, op: Signature) -> Rule | None:
        if len(op.operands) != len(self.operands) or len(op.results) != len(self.results):
            return None
        factors = Factors()
        found: dict[tuple[str, int], Dim] = {}
        extents: dict[tuple[str, int], int] = {}
        sides: list[list[list[Dim]]] = []
        for shapes, tensors in ((op.operands, self.operands), (op.results, self.results)):
            sides.append([])
            for shape, names in zip(shapes, tensors, strict=True):
                keys = _keys(shape, names)
                if keys is None:
                    return None
                for key, size in zip(keys, shape, strict=True):
                    if extents.setdefault(key, size) != size:
                        return None
                    if key not in found:
                        found[key] = self._factor(factors, key[0], size)
                sides[-1].append([found[key] for key in keys])
        return factors.rule(sides[0], sides[1])

    def _factor(self, factors: Factors, name: str, size: int) -> Dim:
        if name in self.whole or name.startswith(_WHOLE):
            return factors.new(size, "replicated")
        return factors.new(size, "reduce", "add") if name in self.sums else factors.new(size)


def _keys(shape: Shape, names: Sequence[str]) -> list[tuple[str, int]] | None:
    """The key of each dim of a tensor: its name, and for `...` its position from the right; None if ranks differ."""
    if names == (_WHOLE,):
        return [(f"{_WHOLE}{shape}", place) for place in range(len(shape))]
    if names[:1] == (_REST,):
        rest = len(shape) - len(names) + 1
        return None if rest < 0 else [*((_REST, rest - i) for i in range(rest)), *((name, 0) for name in names[1:])]
    return [(name, 0) for name in names] if len(names) == len(shape) else None


# ---- built in ------------------------------------------------------------------------------------------------------


@custom_call_rule(
    *("Qr", "Eigh", "LuDecomposition", "ProductOfElementaryHouseholderReflectors"),
    *("TopK", "ApproxTopK", "LayoutConstraint"),
)
def whole(op: Signature) -> Rule:
    """Replicated: XLA's partitioners cannot split it."""
    return gathered(op)


@custom_call_rule("tpu_custom_call")
def flash_attention(op: Signature) -> Rule | None:
    """A Mosaic kernel over `(batch, heads, sequence, features)`, as torch_xla's flash and splash attention.

    The kernel is independent in batch and heads; but it is compiled for fixed shapes, so XLA gathers its operands. To
    run it on shards, the model passes a mesh and a partition spec to torch_xla's function.
    """
    attention = [shape for shape in op.operands if len(shape) == 4]
    same = len({shape[:2] for shape in attention}) == 1
    return gathered(op) if len(attention) >= 3 and same else None


@custom_call_rule("MoveToHost", "MoveToDevice", "annotate_device_placement")
def passes(op: Signature) -> Rule | None:
    """The identity."""
    if op.operands[: len(op.results)] != op.results:
        return None
    factors = Factors()
    dims = [factors.dims(shape) for shape in op.results]
    extra = [factors.dims(shape, "replicated") for shape in op.operands[len(op.results) :]]
    return factors.rule([*dims, *extra], dims)
