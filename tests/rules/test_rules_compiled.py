"""Every rule under random strategies: the collectives are those counted and predicted, the numbers are right.

`benchmarks/rules.py` runs more of the same, on all targets; what came of it is in `docs/rules.md`.
"""

import pytest

from autoshard.graph.groups import ELEMENTWISE
from autoshard.graph.rules import table as rules  # noqa: F401  registers every rule
from autoshard.graph.rules.base import CUSTOM_CALL_RULES, RULES
from tests.rules.harness import BUILDERS, MESHES, TORCH, Case, batch_of, check, run
from tests.rules.snippets import WITHOUT
from tests.rules.torch_forms import FUNCTIONS

CHEAP = sorted(kind for kind in BUILDERS if kind in ELEMENTWISE)

MISPREDICTED = (
    *("torch.avg_pool.backward", "torch.avg_pool3d.backward"),  # interior padding of a dim that is split in space
    *("torch.adaptive_avg_pool_four", "torch.adaptive_avg_pool_four.backward"),  # the count that it divides by
)


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
    assert [str(row) for row in rows if not row.agrees or not row.counts] == []
    if mesh == 0:
        run(batch, rows)
        assert [str(row) for row in rows if not row.equal] == []


def test_what_pytorch_writes_under_random_strategies():
    names = [f"{TORCH}{name}{end}" for name in FUNCTIONS for end in ("", ".backward")]
    rows = check(batch_of([Case(name, 1) for name in names if name not in MISPREDICTED]), "cpu")
    assert [str(row) for row in rows if not row.agrees] == []


def test_uneven_updates_are_not_scattered_unevenly():
    # XLA pads their indices with 0: what pads the updates would be added to row 0. Wrong numbers before.
    batch = batch_of([Case("scatter", seed) for seed in (1000, 1004, 1008, 1012)])
    rows = check(batch, "cpu")
    run(batch, rows)
    assert [str(row) for row in rows if not row.equal] == []
