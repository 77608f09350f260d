"""Products of operands that some devices hold copies of, as compiled."""

from __future__ import annotations

import pytest

from autoshard.mesh import Mesh
from tests.cost.few_ops import compiled_for, f32

BATCH = ("data", "fsdp")


@pytest.mark.parametrize(
    ("device", "target"), [("cpu", "cpu:16"), ("tpu-v5e:4x4", "tpu-v5e:4x4"), ("h100:2x8", "h100:2x8")]
)
@pytest.mark.parametrize("rows", [64, 2048])
def test_a_weight_split_within_what_splits_the_batch_is_gathered(device: str, target: str, rows: int) -> None:
    """`[batch/(data, fsdp), rows, k/model] x [k/model, n/fsdp]`, with columns of the result split over `model`."""
    if device != "cpu":
        pytest.importorskip("libtpu" if "tpu" in device else "jax_plugins.xla_cuda12")
    mesh = Mesh((2, 4, 2), ("data", "fsdp", "model"), device=device)
    given = [f32(16, rows, 1024), f32(1024, 512), f32(16, rows, 512)]
    specs = [(BATCH, (), ("model",)), (("model",), ("fsdp",)), (BATCH, (), ("model",))]
    report, _ = compiled_for(target, lambda x, w, y: x @ w + y, given, specs, mesh=mesh)
    assert {row.axes for row in report.fidelity.rows if row.kind == "all-gather"} == {("fsdp",)}
    assert report.fidelity.compiled_bytes == report.fidelity.predicted_bytes
