"""Gathers of rows that are too long for one piece, held against the TPU's compiler."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.compiler.tpu.gathers import JOINED
from tests.cost.few_ops import compiled_for, f32, ids

pytest.importorskip("libtpu")
WHOLE, ROWS = ((), (), ()), (("data", "model"),)
EIGHT = 8
"""Devices, each of which looks up so many rows."""


def rows(table: jax.Array, lookups: jax.Array) -> jax.Array:
    return table.at[lookups].get(mode="promise_in_bounds")


def multiplied(table: jax.Array, lookups: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("tfh,th->tf", rows(table, lookups), x)


def kept(table: jax.Array, lookups: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = rows(table, lookups)
    return found, jnp.einsum("tfh,th->tf", found, x)


@pytest.mark.parametrize(
    ("target", "row", "lookups", "function", "pieces", "joined"),
    [
        ("tpu-v5e:2x4", (512, 512), 1024, rows, 1, 0),
        ("tpu-v5e:2x4", (1024, 1024), 512, rows, 4, 0),
        ("tpu-v5e:2x4", (1024, 1024), 512, multiplied, 4, 0),
        ("tpu-v5e:2x4", (1024, 1024), 512, kept, 4, 4),
        ("tpu-v5e:2x4", (1280, 1024), 256, rows, 5, 5),
        ("tpu-v5p:2x2x2", (2048, 1024), 256, multiplied, 8, 8),
        ("tpu-v6e:2x4", (1024, 1024), 512, kept, 2, 2),
        ("tpu-v6e:2x4", (512, 1024), 512, kept, 1, 0),
    ],
)
def test_long_rows_are_gathered_in_pieces(
    target: str, row: tuple[int, ...], lookups: int, function: Callable[..., object], pieces: int, joined: int
) -> None:
    arguments = [f32(8, *row), ids(EIGHT * lookups)]
    specs = [WHOLE, ROWS]
    if function is not rows:
        arguments.append(f32(EIGHT * lookups, row[1]))
        specs.append((*ROWS, ()))
    report, compiled = compiled_for(target, function, arguments, specs)  # type: ignore[arg-type]
    entry = compiled.hlo_text.split("\nENTRY")[1]
    assert len(re.findall(r"%gather_fusion\S* = ", entry)) == pieces
    assert len(re.findall(r"%\S*dynamic-update-slice\S* = ", entry)) == joined
    kinds = {step.kind for step in report.prediction.compiled.program.steps}
    assert (JOINED in kinds) == (joined > 0)
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.02)
    assert report.prediction.step_time_s == pytest.approx(report.judged.step_time_s, rel=0.025)


@pytest.mark.parametrize(
    ("target", "row", "lookups", "loops"),
    [
        ("tpu-v5e:2x4", (1280, 1024), 64, 0),
        ("tpu-v5e:2x4", (1344, 1024), 64, 1),
        ("tpu-v5e:2x4", (4096, 1024), 64, 1),
        ("tpu-v5p:2x2x2", (2048, 1024), 128, 1),
        ("tpu-v6e:2x4", (2048, 1024), 64, 0),
        ("tpu-v6e:2x4", (4096, 1024), 64, 1),
    ],
)
def test_longer_rows_are_scattered_one_by_one(target: str, row: tuple[int, ...], lookups: int, loops: int) -> None:
    def added(lookups: jax.Array, updates: jax.Array) -> jax.Array:
        return jnp.zeros((8, *row)).at[lookups].add(updates, mode="promise_in_bounds")

    report, compiled = compiled_for(target, added, [ids(lookups), f32(lookups, *row)], [((),), WHOLE])
    (scatter,) = [step for step in report.prediction.compiled.program.steps if step.kind == "scatter"]
    assert compiled.hlo_text.split("\nENTRY")[1].count(" while(") == loops
    assert scatter.turns == lookups * loops
    assert scatter.inner[1] >= (3 * lookups - 1) * loops
    if row == (4096, 1024) or target == "tpu-v5p:2x2x2":  # in device memory: on chip it is copied to the result after
        assert report.prediction.step_time_s == pytest.approx(report.judged.step_time_s, rel=0.02)


def test_a_scatter_with_kernels_of_its_own_for_its_indices_is_no_loop() -> None:
    """It was taken for one: T5's memory traffic on v5p was 30 % too high."""

    def added(lookups: jax.Array, updates: jax.Array) -> jax.Array:
        return jnp.zeros((100_000, 64)).at[lookups].add(updates, mode="promise_in_bounds")

    report, _ = compiled_for("tpu-v5p:2x2x2", added, [ids(8, 512), f32(8, 512, 64)], [((), ()), ((), (), ())])
    (scatter,) = [step for step in report.prediction.compiled.program.steps if step.kind == "scatter"]
    assert not scatter.turns
    assert scatter.inner[1] > 0
    assert report.prediction.step_time_s == pytest.approx(report.judged.step_time_s, rel=0.1)
