"""Every rule under random strategies: the collectives are those counted and predicted, the numbers are right.

`benchmarks/rules.py` runs more of the same, on all targets; what is known to disagree is in `docs/rules.md`.
"""

import pytest

from autoshard.graph import rules  # noqa: F401  registers every rule
from autoshard.graph.groups import ELEMENTWISE
from autoshard.graph.rules_base import CUSTOM_CALL_RULES, RULES
from tests.rules.harness import BUILDERS, MESHES, Case, batch_of, check, run
from tests.rules.snippets import WITHOUT

KNOWN = {
    *("batch_norm_training", "batch_norm_inference", "batch_norm_grad", "top_k", "sort", "convolution"),
    *("select_and_scatter", "reduce_window"),
}
"""Kinds of which strategies, or the prediction, are known to be wrong in some cases (docs/rules.md)."""

CHEAP = sorted(kind for kind in BUILDERS if kind in ELEMENTWISE)


def test_every_rule_has_a_case():
    assert set(RULES) | set(CUSTOM_CALL_RULES) == set(BUILDERS) | set(WITHOUT)
    assert not set(BUILDERS).intersection(WITHOUT)


def test_a_case_is_the_same_each_time():
    cases = [Case("dot_general", 4), Case("scatter", 8)]
    first, again = batch_of(cases), batch_of(cases)
    alone = batch_of(cases[1:])
    assert first.program.stablehlo == again.program.stablehlo
    assert first.annotations == again.annotations
    assert first.strategy[1] == alone.strategy[0]


@pytest.mark.parametrize("mesh", range(len(MESHES)))
def test_rules_under_random_strategies(mesh):
    kinds = sorted(set(BUILDERS) - set(CHEAP)) + CHEAP[mesh :: len(MESHES)]
    batch = batch_of([Case(rule, mesh) for rule in kinds])
    rows = check(batch, "cpu")
    judged = [row for row in rows if row.case.rule not in KNOWN]
    assert [str(row) for row in judged if not row.agrees or not row.counts] == []
    if mesh == 0:
        run(batch, rows)
        assert [str(row) for row in rows if not row.equal] == []
