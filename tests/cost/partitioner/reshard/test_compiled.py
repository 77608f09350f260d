"""What is predicted of reshards, held against the CPU's compiler."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from autoshard.cost.partitioner.reshard.price import reshard
from autoshard.mesh import Mesh

pytest.importorskip("jax")
reshards = pytest.importorskip("benchmarks.reshards")


@pytest.mark.parametrize(("sizes", "uneven"), [((2, 4), False), ((2, 3), True), ((2, 2, 2), False), ((3, 2, 4), True)])
def test_predicted_reshards_are_what_is_compiled(
    sizes: tuple[int, ...], uneven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_disable_hlo_passes={reshards.MERGING}")
    mesh = Mesh(sizes, ("x", "y", "z")[: len(sizes)])
    pairs = random.Random(sum(sizes)).sample(reshards.pairs_of(mesh, 2), 20)
    shape = (361, 362) if uneven else (384, 192)
    for (src, dst), found in reshards.measure("cpu", mesh, pairs, shape):
        predicted = reshard(shape, 4, src, dst, mesh, "cpu")
        assert Counter((each.kind, each.axes, each.bytes) for each in predicted) == Counter(found), (src, dst)
