"""docs/ops.md says of every op that StableHLO and CHLO have what becomes of it."""

from pathlib import Path

from benchmarks.ops_table import ABSENT, IMPORTED, document, registered, unsaid

ROOT = Path(__file__).resolve().parents[2]


def test_something_is_said_of_every_registered_op() -> None:
    assert len(registered()) > 150
    assert unsaid() == []


def test_nothing_is_said_of_ops_that_are_not_registered() -> None:
    names = {name.removeprefix("stablehlo.") for name in registered()}
    assert set(ABSENT) <= names
    assert {name.removeprefix("stablehlo.") for name in IMPORTED} <= names


def test_the_document_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "ops.md").read_text() == document(), "python benchmarks/ops_table.py > docs/ops.md"
