"""Loops: what their bodies emit counts once per iteration, and what cannot be split inside is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autoshard.cost.machine.compute import body_work, op_flops
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from tests.graph.helpers import graph_of, only

jax = pytest.importorskip("jax")
jnp = jax.numpy
MESH = Mesh((2, 4), device="cpu")
LAYERS, ROWS, WIDTH, HIDDEN = 6, 16, 32, 64


def stacked(layer: Any) -> Graph:
    return graph_of(
        lambda x, a, b: jax.lax.scan(layer, x, (a, b))[0],
        np.zeros((ROWS, WIDTH), np.float32),
        np.zeros((LAYERS, WIDTH, HIDDEN), np.float32),
        np.zeros((LAYERS, HIDDEN, WIDTH), np.float32),
    )


def feed_forward(carry: Any, weights: Any) -> Any:
    return carry + jnp.tanh(carry @ weights[0]) @ weights[1], None


def predicted(graph: Graph, specs: dict[tuple[int, ...], Any]) -> Any:
    pins = {Value(op): specs[graph.ops[op].results[0].shape] for op in graph.arguments}
    return predict(graph, Annotations(pins, {}), MESH, load_device("cpu"))


def test_a_sum_inside_a_loop_is_reduced_in_every_iteration() -> None:
    found = predicted(
        stacked(feed_forward),
        {
            (ROWS, WIDTH): ((), ()),
            (LAYERS, WIDTH, HIDDEN): ((), (), ("model",)),
            (LAYERS, HIDDEN, WIDTH): ((), ("model",), ()),
        },
    )
    (sums,) = found.collectives
    assert (sums.kind, sums.axes, sums.count) == ("all-reduce", ("model",), LAYERS)
    assert sums.bytes == ROWS * WIDTH * 4


def test_rows_run_through_a_loop_without_communication() -> None:
    whole = ((), (), ())
    found = predicted(
        stacked(feed_forward),
        {(ROWS, WIDTH): (("data",), ()), (LAYERS, WIDTH, HIDDEN): whole, (LAYERS, HIDDEN, WIDTH): whole},
    )
    assert [one for one in found.collectives if one.count * one.bytes] == []
    assert found.replicated_ops == ()


def test_the_work_of_a_loop_is_that_of_its_body_in_every_iteration() -> None:
    graph = stacked(feed_forward)
    loop = only(graph, "while")
    products = 2 * 2 * ROWS * WIDTH * HIDDEN * LAYERS
    assert products <= op_flops(loop, graph) < 1.1 * products
    size, kernels = body_work(loop)
    assert size > LAYERS * 4 * (2 * WIDTH * HIDDEN + 2 * ROWS * WIDTH)
    assert kernels >= 2 * LAYERS


def test_what_is_replicated_inside_a_loop_is_named_with_what_all_iterations_cost() -> None:
    def layer(carry: Any, weights: Any) -> Any:
        return carry + jnp.fft.irfft(jnp.fft.rfft(carry @ weights[0] @ weights[1]), n=WIDTH), None

    whole = ((), (), ())
    found = predicted(
        stacked(layer),
        {(ROWS, WIDTH): ((), ()), (LAYERS, WIDTH, HIDDEN): whole, (LAYERS, HIDDEN, WIDTH): whole},
    )
    assert {each.op for each in found.replicated_ops} == {"fft"}
    assert all("gather" in each.reason and each.cost_s > 0 for each in found.replicated_ops)
