"""Arguments that are updated by what is split otherwise than they are, held against the compilers."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from autoshard.mesh import Spec
from tests.cost.few_ops import compiled_for, f32

WHOLE: Spec = ((), ())


def momentum(weight, mean, rows, columns):
    """A step with momentum; the gradient is a product of rows and columns."""
    moved = mean + 0.1 * (rows.T @ columns - mean)
    return weight - 0.01 * moved / (jnp.abs(moved) + 1.0), moved


@pytest.mark.parametrize(
    ("target", "package", "gathers"),
    [("h100:8", "jax_plugins.xla_cuda12", 1), ("cpu:8", "jax", 2), ("tpu-v5e:2x4", "libtpu", 2)],
)
def test_on_gpus_what_makes_a_result_has_the_annotation_of_the_result(target: str, package: str, gathers: int) -> None:
    """There the momentum is gathered once, and weights follow from it; elsewhere both are parts up to the end."""
    pytest.importorskip(package)
    size = 1024
    specs: list[Spec] = [WHOLE, WHOLE, (("data",), ()), (("data",), ("model",))]
    report, _ = compiled_for(target, momentum, [f32(size, size)] * 4, specs, {0: 0, 1: 1})
    gathered = [row for row in report.fidelity.rows if row.kind == "all-gather"]
    assert [(row.predicted_bytes, row.compiled_bytes) for row in gathered] == [(4 * gathers * size**2,) * 2]
