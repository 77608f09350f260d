"""FLOP and bytes of ops, and the roofline.

A kernel takes max(flops / achievable FLOP/s, bytes / achievable bytes/s) plus one launch (Williams, Waterman,
Patterson, "Roofline", CACM 2009). FLOPs follow XLA's HloCostAnalysis: two per multiply-add, one per element of an
elementwise op; a convolution counts only taps that read input elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.attention.kernels import BACKWARD_PRODUCTS
from autoshard.cost.machine.device import Device
from autoshard.dtypes import dtype_bytes
from autoshard.experts.dims import products
from autoshard.experts.form import KINDS as EXPERTS
from autoshard.fused import KINDS
from autoshard.graph.body import Body
from autoshard.graph.groups import BARRIER, ELEMENTWISE, fusion_groups
from autoshard.graph.ops import Graph, Op

CONTRACTIONS = frozenset({"dot_general", "convolution", "triangular_solve", "cholesky"})
"""Kinds whose FLOPs run on the matrix units that `Device.flops` describes."""

MATRIX_WORK = CONTRACTIONS | KINDS
"""These, and attention and experts kept as one op."""

BODIES = frozenset({"while", "case"})
"""Kinds with subgraphs (`graph/body.py`)."""

_NO_FLOPS = frozenset(
    """argument constant iota broadcast_in_dim reshape transpose slice concatenate pad reverse gather dynamic_slice
    dynamic_update_slice optimization_barrier bitcast_convert partition_id replica_id all_gather real imag
    complex""".split()  # noqa: SIM905
)
_PER_ELEMENT = {"batch_norm_training": 8, "batch_norm_inference": 4, "batch_norm_grad": 14, "rng_bit_generator": 10}


def op_flops(op: Op, graph: Graph) -> float:
    """FLOPs of the global op; 0 for ops that only move data.

    A loop counts its body times its trip count (1 if unknown: a lower bound), a conditional its costliest branch.
    Unknown kinds count one FLOP per result element.
    """
    if op.kind in _NO_FLOPS:
        return 0.0
    elements = float(sum(math.prod(result.shape) for result in op.results))
    if op.kind in ELEMENTWISE:
        return elements
    shapes = [graph.type_of(value).shape for value in op.operands]
    attrs = op.attrs
    if op.kind == "dot_general":
        return 2.0 * elements * _count(shapes[0][dim] for dim in attrs["lhs_contract"])
    if op.kind in KINDS:
        return _experts_flops(op, shapes) if op.kind in EXPERTS else _attention_flops(op, shapes)
    if op.kind == "convolution":
        return _convolution_flops(op, shapes[0], shapes[1])
    if op.kind in ("reduce", "sort"):
        taken = float(sum(math.prod(shape) for shape in shapes[: len(op.results)]))
        rounds = max(1.0, math.log2(max(shapes[0][attrs["dim"]], 2))) if op.kind == "sort" else 1.0
        return taken * rounds
    if op.kind == "reduce_window":
        return elements * _count(attrs["window"])
    if op.kind == "select_and_scatter":
        return float(math.prod(shapes[1])) * (_count(attrs["window"]) + 1)
    if op.kind == "scatter":
        return float(sum(math.prod(shape) for shape in shapes[len(op.results) + 1 :]))
    if op.kind in _PER_ELEMENT:
        return float(math.prod(op.results[0].shape)) * _PER_ELEMENT[op.kind]
    if op.kind == "top_k":
        return float(math.prod(shapes[0])) * max(1.0, math.log2(max(int(attrs["k"]), 2)))
    if op.kind == "fft":
        length = math.prod(attrs["length"])
        return 5.0 * math.prod(shapes[0]) * math.log2(max(length, 2))
    if op.kind == "cholesky":
        return float(math.prod(shapes[0])) * shapes[0][-1] / 3
    if op.kind == "triangular_solve":
        return float(math.prod(shapes[1])) * shapes[0][-1]
    if op.kind in BODIES:
        each = [sum(op_flops(inner, body.graph) for inner in body.graph.ops) for body in attrs["bodies"]]
        return float(attrs["trip_count"] or 1) * sum(each) if op.kind == "while" else max(each)
    return elements


def _attention_flops(op: Op, shapes: Sequence[Sequence[int]]) -> float:
    """Two products forward, five backward (FlashAttention-2, arXiv:2307.08691), of the scores that the mask leaves."""
    (*heads, queries, features), (*_, keys, value_features) = shapes[0], shapes[2]
    scores = math.prod(heads) * Form.of(op.attrs).attended(queries, keys)
    if op.kind == FORWARD:
        return 2 * scores * (features + value_features)
    return 2 * scores * (3 * features + 2 * value_features)


def _experts_flops(op: Op, shapes: Sequence[Sequence[int]]) -> float:
    """Products of the rows of all tokens' choices, each with one expert's weights."""
    (tokens, choices), (_, gates, hidden, features) = shapes[1], shapes[3]
    of_up, of_down = products(op.kind)
    return 2.0 * tokens * choices * hidden * features * (of_up * gates + of_down)


def region_share(op: Op, shards: float, target: str) -> float:
    """By how much one device's FLOP of an op that is a manual region exceed its part of `op_flops`.

    Args:
        shards: over how many devices the queries of an attention are split.
        target: whose kernel computes it.
    """
    if op.kind in EXPERTS:
        return 1.0
    share = 1.0
    if op.kind == GRADIENT and target in BACKWARD_PRODUCTS:
        share = sum(BACKWARD_PRODUCTS[target]) / 5
    return share * Form.of(op.attrs).unbalanced(shards)


def op_bytes(op: Op, graph: Graph) -> float:
    """Bytes that the global op reads and writes as a kernel of its own.

    Ops that touch a part of an operand count that part: gather and (dynamic) slice read as much as they write,
    dynamic_update_slice and scatter read and write as much as the update (their operand is updated in place).
    """
    if op.kind in ("argument", "constant"):
        return 0.0
    results = [math.prod(result.shape) * dtype_bytes(result.dtype) for result in op.results]
    types = [graph.type_of(value) for value in op.operands]
    operands = [math.prod(type_.shape) * dtype_bytes(type_.dtype) for type_ in types]
    if op.kind in ("gather", "dynamic_slice", "slice"):
        return float(2 * sum(results) + sum(operands[1:]))
    if op.kind == "dynamic_update_slice":
        return float(2 * operands[1])
    if op.kind == "scatter":
        indices = len(op.results)
        return float(operands[indices] + 3 * sum(operands[indices + 1 :]))
    return float(sum(operands) + sum(results))


def body_work(op: Op) -> tuple[float, float]:
    """(bytes, kernels) of a loop or conditional, unsharded, from the fusion groups of its bodies.

    A loop counts its body times its trip count, a conditional its costliest branch.
    """
    each = [_body_work(body) for body in op.attrs["bodies"]]
    if op.kind == "case":
        return max(each)
    trips = float(op.attrs["trip_count"] or 1)
    return trips * sum(size for size, _ in each), trips * sum(kernels for _, kernels in each)


@lru_cache(maxsize=1024)
def _body_work(body: Body) -> tuple[float, float]:
    graph = body.graph
    total = kernels = 0.0
    for group in fusion_groups(graph).groups:
        first = graph.ops[group.ops[0]]
        if first.kind in BODIES:
            size, count = body_work(first)
        elif len(group.ops) == 1:
            size, count = op_bytes(first, graph), float(first.kind not in ("reshape", BARRIER))
            size = size if count else 0.0
        else:
            types = [graph.type_of(value) for value in (*group.inputs, *group.outputs)]
            size, count = float(sum(math.prod(kind.shape) * dtype_bytes(kind.dtype) for kind in types)), 1.0
        total, kernels = total + size, kernels + count
    return total, kernels


def roofline_seconds(flops: float, bytes: float, dtype: str, device: Device, *, kernels: int = 1) -> float:
    """Seconds of `kernels` launches that together compute `flops` on operands of `dtype` and move `bytes`.

    Both per device, at achievable rates; 0 without any work.
    """
    if flops <= 0 and bytes <= 0:
        return 0.0
    rooflines = flops / device.reachable_flops(dtype), bytes / device.reachable_bandwidth
    return max(rooflines) + kernels * device.kernel_overhead


def _count(sizes: Iterable[int]) -> float:
    return float(math.prod(sizes))


# --- convolution -------------------------------------------------------------------------------------------------


def _convolution_flops(op: Op, lhs: Sequence[int], rhs: Sequence[int]) -> float:
    """2 x (batch, output features, input features of a group) x pairs of output position and tap on the input."""
    attrs = op.attrs
    lhs_dims, rhs_dims, out_dims = attrs["lhs"], attrs["rhs"], attrs["out"]
    out = op.results[0].shape
    pairs = 1.0
    for i in range(len(lhs_dims) - 2):
        pairs *= taps_on_input(
            int(lhs[lhs_dims[2 + i]]),
            int(rhs[rhs_dims[2 + i]]),
            int(out[out_dims[2 + i]]),
            _each(attrs, "stride", i),
            int(attrs["padding"][i][0]),
            _each(attrs, "lhs_dilation", i),
            _each(attrs, "rhs_dilation", i),
        )
    in_features = int(rhs[rhs_dims[1]])
    # With batch groups, each output feature reads one group of the batch: the output's batch dim is already divided.
    return 2.0 * _count((out[out_dims[0]], out[out_dims[1]], in_features)) * pairs


def _each(attrs: Any, name: str, i: int) -> int:
    values = attrs.get(name)
    return int(values[i]) if values else 1


@lru_cache(maxsize=1024)
def taps_on_input(
    size: int, taps: int, outputs: int, stride: int, low: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Pairs (output position, tap) along one dim that read an input element, not padding or a base-dilation hole.

    Args:
        size, outputs: extents of the input and of the result.
        low: padding before the input.
    """
    first = np.arange(outputs)[:, None] * stride - low
    at = first + np.arange(taps)[None, :] * rhs_dilation
    return int(((at >= 0) & (at <= (size - 1) * lhs_dilation) & (at % lhs_dilation == 0)).sum())
