"""What a TPU's gathers and scatters of rows need beside them, as compiled for v5e."""

from __future__ import annotations

import pytest

from autoshard.verify.work import compiled_work
from tests.cost.few_ops import compiled_for, f32, ids

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def looked_up(table: object, i: object) -> object:
    return table.at[i].get(mode="promise_in_bounds").sum(-1)  # type: ignore[attr-defined]


def updated(table: object, i: object, x: object) -> object:
    """Rows are scattered onto zeros, and what they make is added to a table."""
    return table + jnp.tanh(jnp.zeros_like(table).at[i].add(x, mode="promise_in_bounds"))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("shape", "flattening"), [((1024,), 0), ((4, 128), 0), ((8, 512), 1), ((16, 64), 1), ((2048, 4), 2)]
)
def test_a_lookup_has_kernels_that_lay_its_indices_out_flat(shape: tuple[int, ...], flattening: int) -> None:
    arguments = [f32(50_000, 128), ids(*shape)]
    report, made = compiled_for("tpu-v5e:2x4", looked_up, arguments, [((), ()), ((),) * len(shape)])
    names = [kernel.name for kernel in compiled_work(made.hlo_text, "tpu").kernels if kernel.launches]
    before = names[: next(at for at, name in enumerate(names) if "gather" in name)]
    assert sum(name.startswith(("copy", "reshape")) for name in before) == flattening
    compiled = report.prediction.compiled
    gather = next(step for step in compiled.program.steps if step.kind == "gather")
    assert gather.inner[1] == 1 + flattening
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
