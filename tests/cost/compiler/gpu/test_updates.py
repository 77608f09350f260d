"""What GPUs' compilers simplify before they propagate shardings, held against what they compile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.mesh import Spec
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.work import compiled_work
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


def adam(weight, first, second, rows, columns):
    """A step of Adam without corrections, of a gradient that is a product."""
    gradient = (rows.T @ columns).reshape(weight.shape)
    first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
    return weight - 0.001 * first / (jnp.sqrt(second) + 1e-8), first, second


@pytest.mark.parametrize("size", [256, 8192])
def test_an_update_of_few_elements_is_one_kernel_as_well(size: int) -> None:
    """Split over 8, a norm's or a bias's parameter has fewer than a kilobyte."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    split: Spec = (("data", "model"),)
    specs: list[Spec] = [split, split, split, WHOLE, WHOLE]
    arguments = [f32(size), f32(size), f32(size), f32(64, 1), f32(64, size)]
    report, compiled = compiled_for("h100:8", adam, arguments, specs, {0: 0, 1: 1, 2: 2})
    own = len(compiled_work(parse_hlo(compiled.hlo_text), "gpu").kernels)
    assert report.prediction.compiled is not None
    assert sum(seconds > 0 for _, seconds in report.prediction.kernel_s) == own


def chunks(*given):
    """Each of several arrays in three parts, of which each device needs what its neighbours hold."""
    *arrays, weight = given
    parts = [jnp.split(array, 3, axis=1) for array in arrays]
    return [jnp.tanh(first @ weight) * second + third @ weight for first, second, third in parts]


def test_permutes_between_the_same_devices_are_combined() -> None:
    """A modulation of every block (adaLN), split along its features: 209 permutes of a MM-DiT are 32."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    specs: list[Spec] = [((), ("data", "model"))] * 4 + [WHOLE]
    report, compiled = compiled_for("h100:8", chunks, [f32(64, 3 * 1024)] * 4 + [f32(1024, 1024)], specs)
    started = compiled.hlo_text.count(" collective-permute-start(")
    predicted = [kernel for kernel in report.prediction.compiled.kernels if kernel.kind == "collective-permute"]
    assert report.fidelity.value == pytest.approx(0, abs=0.01)
    assert started
    assert len(predicted) == started


def normed_behind(x, wide, back):
    """Two norms that share an exponent: of what is split, and of what is not (OLMo 2: norms behind products)."""

    def normed(y):
        return y * jax.lax.rsqrt((y ** jnp.full(y.shape, 2.0)).mean(-1, keepdims=True) + 1e-5)

    return x + normed(normed(x @ wide) @ back)


@pytest.mark.parametrize(
    ("target", "package", "kinds"),
    [
        ("h100:8", "jax_plugins.xla_cuda12", {"all-reduce"}),
        ("cpu:8", "jax", {"all-reduce", "reduce-scatter"}),
        ("tpu-v5e:2x4", "libtpu", {"all-reduce"}),
    ],
)
def test_squares_share_no_exponent_but_on_the_cpu(target: str, package: str, kinds: set[str]) -> None:
    """A sharding passed through it: OLMo 2 under Megatron on 8 H100, 200 % of the bytes."""
    pytest.importorskip(package)
    specs: list[Spec] = [(("data",), ()), ((), ("model",)), (("model",), ())]
    report, _ = compiled_for(target, normed_behind, [f32(1024, 512), f32(512, 512), f32(512, 512)], specs)
    assert report.fidelity.value == 0
    assert {row.kind for row in report.fidelity.rows} == kinds
