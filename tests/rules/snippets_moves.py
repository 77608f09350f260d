"""Cases of `graph/rules/shape.py`, `graph/rules/index.py` and `graph/rules/window.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tests.rules.snippets import IDENTITY, MAX_ELEMENTS, Body, Draw, case, i64s, region

# ---- ops that move elements ----------------------------------------------------------------------------------------


@case("broadcast_in_dim")
def broadcast_in_dim(body: Body, draw: Draw) -> None:
    into = draw.shape(2, 4)
    dims = draw.dims(len(into), 1, len(into) - 1)
    source = [1 if draw.chance(0.15) else into[dim] for dim in dims]
    attrs = f"broadcast_dimensions = {i64s(dims)}"
    made = body.one("broadcast_in_dim", [body.arg(source)], into, attrs=attrs, keep=False)
    body.one("add", [made, body.arg(into)], into)


@case("transpose")
def transpose(body: Body, draw: Draw) -> None:
    shape = draw.shape(2, 4)
    order = draw.rng.sample(range(len(shape)), len(shape))
    body.one("transpose", [body.arg(shape)], [shape[i] for i in order], attrs=f"permutation = {i64s(order)}")


@case("reshape")
def reshape(body: Body, draw: Draw) -> None:
    """Dims merged, split, or cut elsewhere."""
    parts = [draw.one((1, 2, 3, 4, 8, 8, 16)) for _ in range(draw.one((2, 3, 4, 5)))]
    while math.prod(parts) * 8 > MAX_ELEMENTS:
        parts.remove(max(parts))
    if draw.chance(0.8):
        parts.append(draw.one((8, 16, 32, 50)))
    shapes = []
    for _ in range(2):
        cuts = [i for i in range(1, len(parts)) if draw.chance(0.5)]
        edges = [0, *cuts, len(parts)]
        shapes.append([math.prod(parts[a:b]) for a, b in itertools.pairwise(edges)])
    if shapes[0] == shapes[1]:
        shapes[1] = [math.prod(parts)] if len(shapes[0]) > 1 else [*parts]
    body.one("reshape", [body.arg(shapes[0])], shapes[1])


@case("slice")
def slice_(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    start, limit, stride = [0] * len(shape), list(shape), [1] * len(shape)
    for dim in draw.dims(len(shape), 1, 2):
        kept = max(1, shape[dim] // draw.one((2, 3, 4, 8)) if draw.chance(0.6) else shape[dim] - 1)
        start[dim] = draw.one(range(shape[dim] - kept + 1))
        limit[dim] = start[dim] + kept
        stride[dim] = draw.one((1, 1, 1, 2))
    into = [-(-(b - a) // s) for a, b, s in zip(start, limit, stride, strict=True)]
    attrs = f"start_indices = {i64s(start)}, limit_indices = {i64s(limit)}, strides = {i64s(stride)}"
    body.one("slice", [body.arg(shape)], into, attrs=attrs)


@case("pad")
def pad(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    low, high, inner = ([0] * len(shape) for _ in range(3))
    for dim in draw.dims(len(shape), 1, 2):
        low[dim], high[dim] = draw.one((0, 1, 2, 8)), draw.one((0, 1, 8))
        inner[dim] = draw.one((0, 0, 0, 1))
    into = [lo + size + hi + (size - 1) * gap for size, lo, hi, gap in zip(shape, low, high, inner, strict=True)]
    attrs = f"edge_padding_low = {i64s(low)}, edge_padding_high = {i64s(high)}, interior_padding = {i64s(inner)}"
    body.one("pad", [body.arg(shape), body.const("0.0")], into, attrs=attrs)


@case("concatenate")
def concatenate(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    dim = draw.one(range(len(shape)))
    parts = [[*shape] for _ in range(draw.one((2, 2, 3)))]
    if draw.chance(0.4):
        parts[-1][dim] = draw.dim()
    whole = [*shape]
    whole[dim] = sum(part[dim] for part in parts)
    body.one("concatenate", [body.arg(part) for part in parts], whole, attrs=f"dimension = {dim} : i64")


@case("reverse")
def reverse(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    body.one("reverse", [body.arg(shape)], shape, attrs=f"dimensions = {i64s(draw.dims(len(shape)))}")


@case("dynamic_slice", "dynamic_update_slice")
def dynamic(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    part = [*shape]
    starts = [body.const("0", (), "i32") for _ in shape]
    for dim in draw.dims(len(shape), 1, 2):
        part[dim] = max(1, draw.one((1, shape[dim] // 2, shape[dim] - 1)))
        starts[dim] = body.arg((), "i32", "ints", max(1, shape[dim] - part[dim] + 1))
    if draw.kind == "dynamic_slice":
        body.one("dynamic_slice", [body.arg(shape), *starts], part, attrs=f"slice_sizes = {i64s(part)}")
    else:
        body.one("dynamic_update_slice", [body.arg(shape), body.arg(part), *starts], shape)


# ---- ops that index ------------------------------------------------------------------------------------------------


@case("gather")
def gather(body: Body, draw: Draw) -> None:
    which = draw.rng.choice(("embedding", "embedding", "along", "batched", "points"))
    if which == "along":  # take_along_axis: one index vector of all coordinates
        rows, columns, taken = draw.dim(), draw.dim(), draw.dim()
        indices = body.arg((rows, taken, 2), "i32", "ints", min(rows, columns))
        _gather(body, (rows, columns), indices.shape, (rows, taken), [], [0, 1], [], [], [0, 1], 2, [1, 1], indices)
    elif which == "batched":
        batch, columns, taken = draw.dim(), draw.dim(), draw.dim()
        indices = body.arg((batch, taken, 1), "i32", "ints", columns)
        _gather(body, (batch, columns), indices.shape, (batch, taken), [], [1], [0], [0], [1], 2, [1, 1], indices)
    elif which == "points":  # rows of two indexed dims
        shape = (draw.dim(), draw.dim(), draw.one((8, 16)))
        count = draw.dim()
        indices = body.arg((count, 2), "i32", "ints", min(shape[:2]))
        _gather(
            body, shape, indices.shape, (count, shape[2]), [1], [0, 1], [], [], [0, 1], 1, [1, 1, shape[2]], indices
        )
    else:
        rows, width = draw.dim(), draw.dim()
        batch = [draw.dim() for _ in range(draw.one((1, 2)))]
        while math.prod(batch) * width > MAX_ELEMENTS:
            batch[batch.index(max(batch))] = 8
        vector = draw.chance(0.5)
        indices = body.arg([*batch, 1] if vector else batch, "i32", "ints", rows)
        _gather(
            body, (rows, width), indices.shape, [*batch, width], [len(batch)], [0], [], [], [0], len(batch),
            [1, width], indices,
        )  # fmt: skip


def _gather(
    body: Body,
    shape: Sequence[int],
    _: Sequence[int],
    into: Sequence[int],
    offset: list[int],
    collapsed: list[int],
    operand_batch: list[int],
    indices_batch: list[int],
    mapped: list[int],
    vector: int,
    sizes: list[int],
    indices: object,
) -> None:
    numbers = (
        f"dimension_numbers = #stablehlo.gather<offset_dims = {offset}, collapsed_slice_dims = {collapsed}, "
        f"operand_batching_dims = {operand_batch}, start_indices_batching_dims = {indices_batch}, "
        f"start_index_map = {mapped}, index_vector_dim = {vector}>, slice_sizes = {i64s(sizes)}, "
        "indices_are_sorted = false"
    )
    body.one("gather", [body.arg(shape), indices], into, attrs=numbers)  # type: ignore[list-item]


@case("scatter")
def scatter(body: Body, draw: Draw) -> None:
    which = draw.rng.choice(("embedding", "embedding", "along", "batched"))
    reducer = draw.rng.choice(("add", "add", "add", "maximum", "assign"))
    batch = [draw.dim() for _ in range(draw.one((1, 2)))]
    rows, width = draw.dim(), draw.dim()
    while math.prod(batch) * width > MAX_ELEMENTS:
        batch[batch.index(max(batch))] = 8
    shape: list[int] = [rows, width]
    if which == "embedding":
        indices = body.arg([*batch, 1], "i32", "ints", rows)
        updates = body.arg([*batch, width])
        window, inserted, ob, ib, mapped, vector = [len(batch)], [0], [], [], [0], len(batch)
    elif which == "along":
        indices = body.arg((rows, batch[0], 2), "i32", "ints", min(rows, width))
        updates = body.arg((rows, batch[0]))
        window, inserted, ob, ib, mapped, vector = [], [0, 1], [], [], [0, 1], 2
    else:
        indices = body.arg((rows, batch[0], 1), "i32", "ints", width)
        updates = body.arg((rows, batch[0]))
        window, inserted, ob, ib, mapped, vector = [], [1], [0], [0], [1], 2
    if reducer == "assign":  # which of several updates stays is not defined: all write one number
        updates = body.one("broadcast_in_dim", [body.const("3.0")], updates.shape,
                           attrs="broadcast_dimensions = array<i64>", keep=False)  # fmt: skip
    numbers = (
        f"scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = {window}, inserted_window_dims = "
        f"{inserted}, input_batching_dims = {ob}, scatter_indices_batching_dims = {ib}, "
        f"scatter_dims_to_operand_dims = {mapped}, index_vector_dim = {vector}>, indices_are_sorted = false, "
        "unique_indices = false"
    )
    if draw.chance(0.6):
        operand = body.one("broadcast_in_dim", [body.const("0.0")], shape,
                           attrs="broadcast_dimensions = array<i64>", keep=False)  # fmt: skip
    else:
        operand = body.arg(shape)
    made = body.one("scatter", [operand, indices, updates], shape, "f32", numbers, region(reducer, ["f32"]))
    if draw.chance(0.3):
        body.read(made, draw)


@case("sort")
def sort(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    dim = draw.one(range(len(shape)))
    attrs = f"dimension = {dim} : i64, is_stable = true"
    if draw.chance(0.5):
        order = """({
^bb0(%a: tensor<f32>, %b: tensor<f32>):
%c = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
stablehlo.return %c : tensor<i1>
})"""
        body.one("sort", [body.arg(shape)], shape, "f32", attrs, order)
        return
    order = """({
^bb0(%a: tensor<f32>, %b: tensor<f32>, %i: tensor<i32>, %j: tensor<i32>):
%c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
stablehlo.return %c : tensor<i1>
})"""
    place = body.one("iota", [], shape, "i32", f"iota_dimension = {dim} : i64", keep=False)
    body.op("sort", [body.arg(shape), place], [(shape, "f32"), (shape, "i32")], attrs, order)


@case("top_k")
def top_k(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    k = max(1, min(shape[-1], draw.one((1, 2, 8))))
    into = [*shape[:-1], k]
    body.op("chlo.top_k", [body.arg(shape)], [(into, "f32"), (into, "i32")], f"k = {k} : i64")


@case("TopK")
def top_k_call(body: Body, draw: Draw) -> None:
    shape = draw.shape(2, 2)  # what XLA's CPU has an implementation of
    k = max(1, min(shape[-1], draw.one((1, 2, 8))))
    into = [*shape[:-1], k]
    attrs = 'call_target_name = "TopK"'
    body.op("custom_call", [body.arg(shape)], [(into, "f32"), (into, "i32")], attrs)


# ---- sliding windows -----------------------------------------------------------------------------------------------


@case("reduce_window", "select_and_scatter")
def windows(body: Body, draw: Draw) -> None:
    shape = draw.shape(2, 4)
    window, stride = [1] * len(shape), [1] * len(shape)
    padding = [(0, 0)] * len(shape)
    for dim in draw.dims(len(shape), 1, 2):
        if shape[dim] < 4:
            continue
        window[dim] = draw.one((2, 3))
        stride[dim] = draw.one((1, 2))
        edge = draw.one((0, 0, 1))
        padding[dim] = (edge, edge)
    into = [(size + sum(p) - w) // s + 1 for size, w, s, p in zip(shape, window, stride, padding, strict=True)]
    edges = ", ".join(f"[{a}, {b}]" for a, b in padding)
    attrs = f"window_dimensions = {i64s(window)}, window_strides = {i64s(stride)}, "
    attrs += f"padding = dense<[{edges}]> : tensor<{len(shape)}x2xi64>"
    if draw.kind == "reduce_window":
        reducer = draw.rng.choice(("add", "maximum"))
        operands = [body.arg(shape), body.const(IDENTITY[reducer])]
        body.one("reduce_window", operands, into, "f32", attrs, region(reducer, ["f32"]))
        return
    select = """({
^bb0(%a: tensor<f32>, %b: tensor<f32>):
%c = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
stablehlo.return %c : tensor<i1>
}, """
    regions = select + region("add", ["f32"]).removeprefix("(")
    body.one("select_and_scatter", [body.arg(shape), body.arg(into), body.const("0.0")], shape, "f32", attrs, regions)


@case("convolution")
def convolution(body: Body, draw: Draw) -> None:
    spatial = draw.one((1, 2))
    batch, features, out = draw.dim(), draw.dim(), draw.dim()
    extents = [draw.one((8, 16, 24)) for _ in range(spatial)]
    taps = [draw.one((1, 3)) for _ in range(spatial)]
    stride = [draw.one((1, 1, 2)) for _ in range(spatial)]
    padding = [draw.one((0, 1)) if tap == 3 else 0 for tap in taps]
    groups = 1
    if draw.chance(0.25):
        features = out = draw.one((8, 16))
        groups = draw.one((2, 4, 8, features))
    while batch * features * math.prod(extents) > MAX_ELEMENTS * 4:
        batch = 8
        extents = [8] * spatial
        features = features if groups > 1 else min(features, 16)
    result = [(e + 2 * p - t) // s + 1 for e, p, t, s in zip(extents, padding, taps, stride, strict=True)]
    names = ", ".join(map(str, range(spatial)))
    edges = ", ".join(f"[{p}, {p}]" for p in padding)
    attrs = (
        f"dimension_numbers = #stablehlo.conv<[b, f, {names}]x[o, i, {names}]->[b, f, {names}]>, "
        f"window_strides = {i64s(stride)}, padding = dense<[{edges}]> : tensor<{spatial}x2xi64>, "
        f"feature_group_count = {groups} : i64, batch_group_count = 1 : i64"
    )
    operands = [body.arg([batch, features, *extents]), body.arg([out, features // groups, *taps])]
    body.approximate = 1e-4
    made = body.one("convolution", operands, [batch, out, *result], attrs=attrs)
    if draw.chance(0.3):
        body.read(made, draw)
