"""Which ops compute again what a checkpoint has let go of, and what of it counts as useful work."""

from __future__ import annotations

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.passes.recomputed import recomputed_ops
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from tests.cost.few_ops import f32
from tests.graph.helpers import graph_of

jax = pytest.importorskip("jax")
jnp = jax.numpy
LAYERS, WIDTH = 3, 128


def trained(remat: bool) -> Graph:
    """The gradients of a few layers, each of two products; `remat` has jax compute them again."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(jnp.tanh(x @ w) @ w.T)

    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for w in weights:
            x = (jax.checkpoint(layer) if remat else layer)(x, w)
        return (x * x).mean()

    def step(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return jax.value_and_grad(loss)(weights, x)

    return graph_of(step, f32(1024, WIDTH), *[f32(WIDTH, WIDTH)] * LAYERS)


def products(graph: Graph) -> set[int]:
    return {op.id for op in graph.ops if op.kind == "dot_general"}


def test_what_jax_computes_again_is_found() -> None:
    plain, remat = trained(False), trained(True)
    assert not recomputed_ops(plain)
    again = products(remat) & recomputed_ops(remat)
    assert len(products(remat)) - len(again) == len(products(plain))
    assert len(again) >= LAYERS


@pytest.mark.parametrize("device", ["cpu", "h100", "tpu-v5e"])
def test_recomputation_is_no_useful_work(device: str) -> None:
    """MFU times the step's seconds is the same with checkpoints and without, within elementwise ops of XLA's own."""
    mesh, kind = Mesh((8,), device=device), load_device(device)
    plain, remat = (predict(trained(remat), Annotations({}), mesh, kind) for remat in (False, True))
    assert remat.mfu * remat.step_time_s == pytest.approx(plain.mfu * plain.step_time_s, rel=0.01)


@pytest.mark.parametrize("device", ["h100", "tpu-v5e"])
def test_what_is_computed_again_is_not_kept(device: str) -> None:
    """Without checkpoints two results of each layer wait for the backward pass, with them its input."""
    mesh, kind = Mesh((8,), device=device), load_device(device)
    kind = kind if not kind.on_chip_bytes else load_device("h100")  # small arrays would lie on chip
    plain, remat = (predict(trained(remat), Annotations({}), mesh, kind).peak_memory_bytes for remat in (False, True))
    assert remat < plain
