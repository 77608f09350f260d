"""Gathers of rows that are too long for one piece, held against the TPU's compiler."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.compiler.tpu.gathers import JOINED
from autoshard.cost.machine import cycles
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


@pytest.fixture
def rooflines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels at their rooflines, predicted and compiled: seconds then tell kernels and traffic apart."""
    monkeypatch.setattr(cycles, "model", lambda kind: None)


@pytest.mark.usefixtures("rooflines")
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
