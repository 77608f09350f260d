"""Parameters that are whole and made anew in parts, held against XLA's TPU compiler."""

from __future__ import annotations

import pytest

from autoshard.mesh import Spec
from tests.cost.few_ops import compiled_for, f32

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy
ALL = ("data", "model")
SIZES = [f32(4096, 4096), f32(4096, 4096), f32(512, 4096), f32(512, 4096)]


def step(weight: object, momentum: object, x: object, wanted: object) -> tuple[object, object]:
    """One update with momentum."""
    momentum = 0.9 * momentum + x.T @ (jnp.tanh(x @ weight) - wanted)
    return weight - 0.1 * momentum, momentum


TWO_CORES = "tpu-v5p:2x2x2"


@pytest.mark.parametrize(
    ("target", "weight"),
    [
        ("tpu-v5e:2x4", ((), ())),
        (TWO_CORES, ((), ())),
        ("tpu-v5e:2x4", (("data",), ())),
        (TWO_CORES, (("data",), ())),
    ],
)
def test_a_gathered_parameter_is_copied_before_and_after(target: str, weight: Spec) -> None:
    """No all-gather writes into the parameter's buffer: on v5p 212 MB where 145 were predicted."""
    specs: list[Spec] = [weight, (ALL, ()), (ALL, ()), (ALL, ())]
    report, _ = compiled_for(target, step, SIZES, specs, updates={0: 0, 1: 1})
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.01)
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.06)
