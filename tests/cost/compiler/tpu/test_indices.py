"""What a TPU's gathers and scatters of rows need beside them, as compiled for v5e."""

from __future__ import annotations

import pytest

from autoshard.cost.compiler.tpu.indices import _flattening
from tests.cost.few_ops import compiled_for, f32, ids

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def looked_up(table: object, i: object) -> object:
    return table.at[i].get(mode="promise_in_bounds").sum(-1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [((1024,), 0), ((1, 512), 0), ((4, 128), 0), ((8, 512), 1), ((16, 64), 1), ((2048, 4), 2), ((256, 26, 4), 2)],
)
def test_indices_of_several_dims_are_copied_and_reshaped(shape: tuple[int, ...], kernels: int) -> None:
    """Kernels counted in programs compiled for v5e and v5p, of one gather and one scatter each."""
    assert _flattening(shape)[1] == kernels


def updated(table: object, i: object, x: object) -> object:
    """Rows are scattered onto zeros, and what they make is added to a table."""
    return table + jnp.tanh(jnp.zeros_like(table).at[i].add(x, mode="promise_in_bounds"))  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(1024,), (2048, 4)])
def test_a_lookup_has_kernels_for_its_indices(shape: tuple[int, ...]) -> None:
    report, _ = compiled_for("tpu-v5e:2x4", looked_up, [f32(50_000, 128), ids(*shape)], [((), ()), ((),) * len(shape)])
    compiled = report.prediction.compiled
    gather = next(step for step in compiled.program.steps if step.kind == "gather")
    assert gather.inner[1] == 1 + _flattening(shape)[1]
    assert compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.1)


@pytest.mark.parametrize("columns", [64, 128])
def test_a_scatter_moves_what_it_adds_and_not_the_table(columns: int) -> None:
    """DLRM's data parallelism: memory traffic +27.0 on v5e and +26.3 on v5p, now +1.0 and +0.1."""
    arguments = [f32(2_000_000, columns), ids(512), f32(512, columns)]
    report, _ = compiled_for("tpu-v5e:2x4", updated, arguments, [((), ()), ((),), ((), ())])
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.02)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.02)


@pytest.mark.parametrize(("rows", "updates", "by_rows"), [(270_000, 1024, 1), (290_000, 1024, 0), (500_000, 2048, 1)])
def test_rows_are_scattered_to_where_a_narrow_table_lies(rows: int, updates: int, by_rows: int) -> None:
    """Unless by rows it takes little more for the rows that are scattered: a million rows of 8 were 512 MB."""
    arguments = [f32(rows, 8), ids(updates), f32(updates, 8)]
    report, _ = compiled_for("tpu-v5e:2x4", updated, arguments, [((), ()), ((),), ((), ())])
    assert (report.memory_bytes > rows * 128 * 4) == by_rows
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.05)
