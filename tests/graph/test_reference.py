"""The reference evaluator that rules are held against, itself held against XLA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.graph.helpers import graph_of, only
from tests.graph.reference import evaluate, whole

jax = pytest.importorskip("jax")
lax = jax.lax


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def ints(limit: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(-1, limit, shape).astype(np.int32)


EMBEDDING = lax.GatherDimensionNumbers((1,), (0,), (0,))
TWO_INDICES = lax.GatherDimensionNumbers((1, 3), (0,), (0, 1))
BATCHED = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
BATCHED_ROWS = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))

CASES: list[tuple[str, Any, list[np.ndarray]]] = [
    (
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (2,)))),
        [floats(2, 3, 4), floats(5, 4, 2)],
    ),
    ("reduce", lambda a: lax.reduce(a, np.float32(0), lax.add, (0, 2)), [floats(2, 3, 4)]),
    ("broadcast_in_dim", lambda a: lax.broadcast_in_dim(a, (3, 2, 4), (1, 2)), [floats(2, 4)]),
    ("transpose", lambda a: lax.transpose(a, (2, 0, 1)), [floats(2, 3, 4)]),
    ("slice", lambda a: lax.slice(a, (1, 0), (4, 5), (2, 1)), [floats(6, 5)]),
    ("pad", lambda a, v: lax.pad(a, v, ((1, 2, 1), (-1, 1, 0))), [floats(3, 4), np.float32(9)]),
    ("concatenate", lambda a, b: lax.concatenate([a, b], 1), [floats(2, 3), floats(2, 1, seed=1)]),
    ("reverse", lambda a: lax.rev(a, (1,)), [floats(2, 3)]),
    ("iota", lambda: lax.broadcasted_iota(np.int32, (2, 3), 1), []),
    ("gather", lambda t, i: lax.gather(t, i, EMBEDDING, (1, 3), mode="clip"), [floats(5, 3), ints(7, 4, 1)]),
    ("gather", lambda t, i: lax.gather(t, i, TWO_INDICES, (1, 2, 2), mode="clip"), [floats(4, 5, 2), ints(6, 2, 3, 2)]),
    ("gather", lambda t, i: lax.gather(t, i, BATCHED, (1, 1), mode="clip"), [floats(4, 5), ints(6, 4, 2, 1)]),
    (
        "scatter",
        lambda t, i, u: lax.scatter_add(t, i, u, ROWS, mode="promise_in_bounds"),
        [floats(5, 3), abs(ints(5, 4, 1)), floats(4, 3, seed=1)],
    ),
    (
        "scatter",
        lambda t, i, u: lax.scatter_mul(t, i, u, BATCHED_ROWS, mode="promise_in_bounds"),
        [floats(4, 5), abs(ints(5, 4, 2, 1)), floats(4, 2, seed=1)],
    ),
    (
        "convolution",
        lambda x, w: lax.conv_general_dilated(
            x, w, (2, 1), ((1, 2), (0, 1)), (1, 2), (2, 1), ("NHWC", "OIHW", "NCHW"), feature_group_count=2
        ),
        [floats(2, 6, 5, 4), floats(6, 2, 2, 3, seed=1)],
    ),
    (
        "convolution",
        lambda x, w: lax.conv_general_dilated(x, w, (1,), ((1, 1),), batch_group_count=2),
        [floats(4, 3, 6), floats(6, 3, 2, seed=1)],
    ),
]


@pytest.mark.parametrize(("kind", "function", "operands"), CASES)
def test_the_reference_agrees_with_xla(kind: str, function: Any, operands: list[np.ndarray]) -> None:
    op = only(graph_of(function, *operands), kind)
    constants = [np.float32(0)] * (len(op.operands) - len(operands))  # a reduction's initial value
    inputs = [np.asarray(operand) for operand in [*operands, *constants]]
    (got,) = evaluate(op, inputs, whole(op, inputs))
    np.testing.assert_allclose(got, np.asarray(jax.jit(function)(*operands)), rtol=1e-5)
