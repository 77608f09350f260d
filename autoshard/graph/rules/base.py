"""The registry of rules, and a builder of factors. `table.py` fills the registry."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from autoshard.graph.ops import DimFactors, Factor, FactorKind, Graph, Op, Rule

Shape: TypeAlias = tuple[int, ...]
Dim: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """The parts of an op that its rule may depend on; equal signatures have one rule.

    Attributes:
        operands, results: shapes.
        attrs: as in `Op.attrs`.
    """

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    attrs: Mapping[str, Any]


RuleFunction: TypeAlias = Callable[[Signature], "Rule | None"]

RULES: dict[str, RuleFunction] = {}
CUSTOM_CALL_RULES: dict[str, RuleFunction] = {}
GATHERED = "XLA's partitioners gather what it reads"
"""Why every device computes all of an op though its dims are independent."""


def rule(*kinds: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of these op kinds.

    It returns None for a form of the op that it cannot describe.
    """
    return _register(RULES, kinds)


def custom_call_rule(*targets: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of `custom_call` ops with these targets."""
    return _register(CUSTOM_CALL_RULES, targets)


def _register(table: dict[str, RuleFunction], names: Iterable[str]) -> Callable[[RuleFunction], RuleFunction]:
    def register(function: RuleFunction) -> RuleFunction:
        table.update(dict.fromkeys(names, function))
        find_rule.cache_clear()
        return function

    return register


@lru_cache(maxsize=1 << 16)
def find_rule(
    kind: str, operands: tuple[Shape, ...], results: tuple[Shape, ...], attrs: tuple[tuple[str, Hashable], ...]
) -> Rule | None:
    """The rule of an op of this kind, operand and result shapes, and attributes (name, value)."""
    signature = Signature(operands, results, dict(attrs))
    function = CUSTOM_CALL_RULES.get(signature.attrs["target"]) if kind == "custom_call" else RULES.get(kind)
    return function(signature) if function else None


def rule_for(op: Op, graph: Graph) -> Rule | None:
    """The sharding rule of `op`, or None without one (the caller replicates the op, and says so).

    Equal ops (kind, shapes and attributes) get the same object.
    """
    operands = tuple(graph.type_of(value).shape for value in op.operands)
    return find_rule(op.kind, operands, tuple(kind.shape for kind in op.results), tuple(op.attrs.items()))


def has_rule(kind: str, target: str = "") -> bool:
    """Whether ops of this kind (custom calls: with this target) have a rule, at least in some of their forms."""
    return target in CUSTOM_CALL_RULES if kind == "custom_call" else kind in RULES


class Factors:
    """Collects the factors of one rule. A dim of extent one (or zero) has none."""

    def __init__(self) -> None:
        """No factors yet."""
        self.all: list[Factor] = []

    def new(self, size: int, kind: FactorKind = "parallel", reducer: str | None = None, *, even: bool = False) -> Dim:
        """A dim of one new factor."""
        if size <= 1:
            return ()
        self.all.append(Factor(size, kind, reducer, even))
        return (len(self.all) - 1,)

    def dims(self, shape: Iterable[int], kind: FactorKind = "parallel") -> list[Dim]:
        """One new factor per dim of `shape`."""
        return [self.new(size, kind) for size in shape]

    def rule(self, operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]], reason: str = "") -> Rule:
        """The rule whose operands' and results' dims have these factors; `reason` as in `Rule`."""
        return Rule(tuple(self.all), _freeze(operands), _freeze(results), reason)


def gathered(op: Signature) -> Rule:
    """A rule without splits, since partitioners gather the operands."""
    factors = Factors()
    operands, results = ([factors.dims(shape, "replicated") for shape in side] for side in (op.operands, op.results))
    return factors.rule(operands, results, GATHERED)


def _freeze(tensors: Sequence[Sequence[Dim]]) -> tuple[DimFactors, ...]:
    return tuple(tuple(dims) for dims in tensors)
