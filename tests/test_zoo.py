"""A few entries of the zoo, as `benchmarks/coverage.py` measures all: planned, and trained with equal numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = [
    "gan-of-two-optimizers",
    "average-of-weights",
    "windowed-attention",
    "checkpoints-of-both-kinds",
    "selective-checkpointing",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("zoo") / "coverage.jsonl"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "coverage.py", *ENTRIES, "--workers", "1", "--out", out],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return {row["entry"]: row for row in map(json.loads, out.read_text().splitlines())}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_trains_under_its_plan_with_equal_numbers(rows, name):
    row = rows[name]
    assert row.get("equal"), row.get("cause")
    assert row["reference"] == "PyTorch in float64"
    assert row["compiled_once"]
    assert row["split"] > 0.5
    assert sum(row["replicated"].values()) <= 0.02


def test_scripts_beside_it_can_load_numba() -> None:
    code = "import sys; sys.path.insert(0, 'benchmarks'); import numba; print('loaded')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "loaded"
