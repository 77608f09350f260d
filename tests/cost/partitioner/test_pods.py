"""What FSDP gathers on slices of many chips, as compiled for them."""

from __future__ import annotations

import pytest

from autoshard.mesh import Mesh
from tests.cost.few_ops import compiled_for, f32

pytest.importorskip("libtpu")


@pytest.mark.parametrize(("target", "shape", "kind"), [
    ("tpu-v5e:4x8", (32,), "collective-permute"),
    ("tpu-v5e:8x8", (64,), "all-gather"),
    ("tpu-v6e:8x8", (8, 8), "all-gather"),
    ("tpu-v5p:4x4x4", (16, 4), "all-reduce"),
    ("tpu-v5p:2x4x8", (64,), "all-reduce"),
    ("tpu-v4:2x4x4", (64,), "all-reduce"),
])  # fmt: skip
def test_windowed_einsums_end_at_64_devices(target: str, shape: tuple[int, ...], kind: str) -> None:
    mesh = Mesh(shape, ("data", "model")[: len(shape)], device=target)
    axes, rows = mesh.axis_names, 8192 * mesh.size
    given, specs = [f32(rows, 4096), f32(4096, 4096)], [(axes, ()), (axes, ())]
    report, _ = compiled_for(target, lambda x, w: x @ w, given, specs, mesh=mesh)
    assert {row.kind for row in report.fidelity.rows if row.compiled_bytes} == {kind}
    assert report.fidelity.compiled_bytes == report.fidelity.predicted_bytes
