"""Every op of StableHLO and CHLO, as the installed dialects register them, and what becomes of each.

    python benchmarks/ops_table.py > docs/ops.md

A test holds docs/ops.md against this, so that an op that a new StableHLO brings is noticed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoshard.graph.groups import ELEMENTWISE
from autoshard.graph.rules import table as rules
from autoshard.graph.rules.base import CUSTOM_CALL_RULES, RULES, RuleFunction
from autoshard.stablehlo.reader import kind_of
from tests.rules.harness import BUILDERS
from tests.rules.snippets import WITHOUT

IMPORTED = {
    "stablehlo.composite": "inlined: its decomposition's ops have rules",
    "stablehlo.get_tuple_element": "taken out by the importer",
    "stablehlo.tuple": "taken out by the importer",
    "stablehlo.return": "ends a region",
    "stablehlo.dot": "read as dot_general",
    "stablehlo.if": "read as case",
}
"""Ops that the importer turns into something else."""

_DYNAMIC = "cannot occur: shapes are known when a program is captured"
_DISTRIBUTED = "cannot occur: a captured program is for one device"
_FRONTEND = "cannot occur: torch_xla has no op that makes it"
_LEGACY = "cannot occur: deprecated, HLO has no such op"
ABSENT = {
    **dict.fromkeys(
        [
            *("dynamic_broadcast_in_dim", "dynamic_conv", "dynamic_gather", "dynamic_iota", "dynamic_pad"),
            *("dynamic_reshape", "real_dynamic_slice", "get_dimension_size", "set_dimension_size"),
        ],
        _DYNAMIC,
    ),
    **dict.fromkeys(
        [
            *("all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute"),
            *("cross-replica-sum", "reduce_scatter"),
        ],
        _DISTRIBUTED,
    ),
    **dict.fromkeys(["after_all", "infeed", "outfeed", "recv", "send", "async_start", "async_done"], _FRONTEND),
    **dict.fromkeys(["broadcast", "einsum", "torch_index_select", "unary_einsum"], _LEGACY),
    **dict.fromkeys(["chlo.scan", "chlo._asin_acos_kernel"], _FRONTEND),
    **dict.fromkeys(["chlo.ragged_dot", "chlo.mulhi"], "jax writes it as a composite, which is inlined"),
    "chlo.constant": "a constant once it is lowered",
}
"""Ops that no captured program holds: why. Names without a dialect are StableHLO's."""


def registered() -> list[str]:
    """The ops of both dialects, by dialect and name."""
    from jaxlib.mlir.dialects import _chlo_ops_gen, _stablehlo_ops_gen

    found = set()
    for module in (_chlo_ops_gen, _stablehlo_ops_gen):
        for one in vars(module).values():
            if inspect.isclass(one) and hasattr(one, "OPERATION_NAME"):
                found.add(one.OPERATION_NAME)
    return sorted(found, key=lambda name: (name.startswith("chlo."), name))


def described(function: RuleFunction) -> str:
    """The first sentence of what a rule says of itself."""
    text = " ".join(line.strip() for line in (function.__doc__ or "").split("\n\n")[0].splitlines())
    return re.split(r"(?<=[.)]) (?=[A-Z])|(?<=\.)$", text)[0].rstrip(".").strip()


def row_of(name: str) -> tuple[str, str, str] | None:
    """(op, what becomes of it, cases); None for an op that nobody has said anything of."""
    bare = name.removeprefix("stablehlo.")
    kind = kind_of(name)
    if name in IMPORTED:
        return bare, IMPORTED[name], "–"
    if bare in ABSENT:
        return bare, ABSENT[bare], "–"
    if name.startswith("chlo.broadcast_"):
        return bare, "cannot occur: torch_xla broadcasts explicitly; its operands' shapes equal, as the op itself", "–"
    if kind == "custom_call":
        return bare, "by target, see below", "by target"
    function = RULES.get(kind)
    if function is None:
        return None
    text = "elementwise: every dim parallel" if kind in ELEMENTWISE else described(function)
    return bare, text, cases_of(kind)


def cases_of(kind: str) -> str:
    """Whether the harness draws cases, or why not."""
    return "yes" if kind in BUILDERS else f"no: {WITHOUT[kind]}"


def unsaid() -> list[str]:
    """Registered ops that neither have a rule nor a word why not."""
    return [name for name in registered() if row_of(name) is None]


def rows() -> Iterator[tuple[str, str, str]]:
    """One row per registered op."""
    for name in registered():
        row = row_of(name)
        if row is not None:
            yield row


def document() -> str:
    """docs/ops.md."""
    assert rules.__all__
    ops = table(("op", "rule", "cases in tests/rules"), rows())
    targets = [(target, described(rule), cases_of(target)) for target, rule in sorted(CUSTOM_CALL_RULES.items())]
    calls = table(("target", "rule", "cases in tests/rules"), targets)
    return f"{HEAD}\n{ops}\n\n{CALLS}\n{calls}\n"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


HEAD = """# Ops

Every op that the installed StableHLO and CHLO dialects register, and what becomes of it in a plan: its rule (dims are
*parallel*, *summed*, exchange *halos*, or stay *whole*), or why no captured program holds it. Made by
`python benchmarks/ops_table.py`; a test fails when an op is in neither column. *Cases*: whether tests/rules draws
random programs of it, which are compiled, predicted and run ([rules.md](rules.md)).

An op without a rule, and one whose rule keeps it whole because XLA's partitioners gather what it reads, is named in the
plan (`replicated_ops`), with what computing it on every device costs.
"""

CALLS = """## Custom calls

A rule is registered by the call's target, in one line of names of dims:

```python
autoshard.register_rule("my_attention", "b h q d, b h k d, b h k d -> b h q d", whole="q k d")
autoshard.register_rule("my_norm", "... d, d -> ... d", whole="d")
autoshard.register_rule("my_dot", "... k, k -> ...", sums="k")
```

Dims of one name are split together; `whole` may not be split, `sums` leaves terms to be added; `...` are leading dims,
`*` is a tensor that is read or made whole. XLA splits a custom call only where the runtime has a partitioner for its
target (jax's `custom_partitioning`); for one that has none pass `partitioned=False`: it is gathered, and named in the
plan with its cost. `register_rule(target)` without dims decorates a function of the shapes and attributes
(`autoshard/graph/rules/base.py`).
"""


if __name__ == "__main__":
    sys.stdout.write(document())
