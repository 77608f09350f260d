"""FLOPs, bytes and the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.machine.compute import op_bytes, op_flops, roofline_seconds
from autoshard.cost.machine.device import load_device
from tests.graph.helpers import graph_of, only

pytest.importorskip("jax")


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    import jax

    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


def flops(kind: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    graph = graph_of(function, *arrays(*shapes))
    return op_flops(only(graph, kind), graph)


def test_dot() -> None:
    import jax.numpy as jnp

    assert flops("dot_general", lambda a, b: a @ b, (5, 7), (7, 11)) == 2 * 5 * 7 * 11
    einsum = lambda a, b: jnp.einsum("bhik,bhjk->bhij", a, b)  # noqa: E731
    assert flops("dot_general", einsum, (2, 3, 4, 8), (2, 3, 5, 8)) == 2 * 2 * 3 * 4 * 5 * 8


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_counts_the_pairs_that_meet_real_input(padding: str, stride: int, groups: int) -> None:
    from jax import lax

    def function(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (stride, 1), padding, feature_group_count=groups)

    n, c, f, size, taps = 2, 4, 6, (9, 8), (3, 5)
    expected = 2.0 * n * f * (c // groups)
    for length, tap, step in zip(size, taps, (stride, 1), strict=True):
        out = -(-length // step) if padding == "SAME" else (length - tap) // step + 1
        low = max((out - 1) * step + tap - length, 0) // 2 if padding == "SAME" else 0
        expected *= sum(0 <= o * step - low + k < length for o in range(out) for k in range(tap))
    assert flops("convolution", function, (n, c, *size), (f, c // groups, *taps)) == expected


def test_the_gradients_of_a_convolution_cost_what_the_convolution_costs() -> None:
    import jax
    from jax import lax

    def loss(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2, 2), "SAME").sum()

    x, w = (2, 4, 8, 8), (6, 4, 3, 3)
    forward = flops("convolution", lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME"), x, w)
    assert flops("convolution", jax.grad(loss, 0), x, w) == forward
    assert flops("convolution", jax.grad(loss, 1), x, w) == forward


def test_elementwise_and_reduce_count_elements() -> None:
    import jax.numpy as jnp

    assert flops("exponential", jnp.exp, (3, 4)) == 12
    assert flops("reduce", lambda x: x.sum(0), (3, 4)) == 12
    assert flops("transpose", lambda x: x.T, (3, 4)) == 0


def test_a_gather_reads_what_it_takes() -> None:
    import jax
    import jax.numpy as jnp

    shapes = [jax.ShapeDtypeStruct((1000, 8), "float32"), jax.ShapeDtypeStruct((5,), "int32")]
    graph = graph_of(lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"), *shapes)
    op = only(graph, "gather")
    assert op_bytes(op, graph) == 2 * 5 * 8 * 4 + 5 * 4
    assert op_flops(op, graph) == 0


def test_bytes_are_operands_and_results() -> None:
    graph = graph_of(lambda a, b: a + b, *arrays((6, 4), (6, 4)))
    assert op_bytes(only(graph, "add"), graph) == 3 * 24 * 4
    assert op_bytes(graph.ops[0], graph) == 0


@given(st.floats(0, 1e15), st.floats(0, 1e12), st.sampled_from(["bf16", "f32"]))
def test_roofline(work: float, moved: float, dtype: str) -> None:
    device = load_device("h100")
    time = roofline_seconds(work, moved, dtype, device)
    compute = work / (device.peak_flops(dtype) * device.achievable_compute)
    memory = moved / (device.memory_bandwidth * device.achievable_memory)
    if work == moved == 0:
        assert time == 0
    else:
        assert time == pytest.approx(max(compute, memory) + device.kernel_overhead)
    assert roofline_seconds(2 * work, moved, dtype, device) >= time
    assert math.isfinite(time)
