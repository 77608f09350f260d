"""The table held against the CPU's compiler, on a mesh and sizes that it was not measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cost.reshard import reshard
from autoshard.mesh import Mesh

pytest.importorskip("jax")
table = pytest.importorskip("benchmarks.reshard_table")


def test_predicted_reshards_are_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_disable_hlo_passes={table.MERGING}")
    mesh = Mesh((2, 4), ("x", "y"))
    pairs = [pair for rank in (1, 2) for pair in table.pairs_of(rank, mesh)][::3]
    shapes = {1: (4096,), 2: (64, 256)}
    for (src, dst), found in table.measure("cpu", mesh, pairs, shapes, 300, 200):
        predicted = reshard(shapes[len(src)], 4, src, dst, mesh, "cpu")
        assert [(each.kind, each.axes, each.bytes) for each in predicted] == [
            (each.kind, each.axes, each.bytes) for each in found
        ], (src, dst)
