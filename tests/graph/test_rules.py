"""Rules are right when the op, run on parts of its operands, gives the parts (or terms) of its result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard
from autoshard.graph.ops import Graph, Op, Rule
from autoshard.graph.rules.base import Factors
from autoshard.graph.rules.custom import forget_rule
from autoshard.graph.rules.table import has_rule, rule_for
from tests.graph.helpers import graph_from_text, graph_of, only
from tests.graph.reference import COMBINE, IDENTITY, Shard, evaluate, whole

jax = pytest.importorskip("jax")
lax = jax.lax
jnp = jax.numpy

few = settings(max_examples=25, deadline=None, derandomize=True)
extents = st.integers(1, 6)
shapes = st.lists(extents, min_size=1, max_size=3).map(tuple)

# ---- the check -----------------------------------------------------------------------------------------------------


def view(
    rule: Rule, shape: tuple[int, ...], dims: Any, cut: int | None = None, parts: int = 1
) -> tuple[list[int], int]:
    """A tensor's shape with one dim per factor, that of `cut` `parts` times smaller, and where `cut` is (or -1)."""
    sizes: list[int] = []
    place = -1
    for extent, factors in zip(shape, dims, strict=True):
        if not factors or rule.factors[factors[0]].kind == "halo":
            sizes.append(extent)
            continue
        for factor in factors:
            if factor == cut:
                place = len(sizes)
            sizes.append(rule.factors[factor].size // (parts if factor == cut else 1))
    return sizes, place


def part_shape(rule: Rule, shape: tuple[int, ...], dims: Any, cut: int, parts: int) -> tuple[int, ...]:
    return tuple(extent // parts if cut in factors else extent for extent, factors in zip(shape, dims, strict=True))


def start(rule: Rule, shape: tuple[int, ...], dims: Any, cut: int, parts: int, part: int) -> tuple[int, ...]:
    return tuple(part * (n // parts) if factors[:1] == (cut,) else 0 for n, factors in zip(shape, dims, strict=True))


def take(rule: Rule, array: np.ndarray, dims: Any, cut: int, parts: int, part: int) -> np.ndarray:
    sizes, place = view(rule, array.shape, dims, cut)
    if place < 0:
        return array
    split = np.split(array.reshape(sizes), parts, axis=place)[part]
    return split.reshape(part_shape(rule, array.shape, dims, cut, parts))


def check_rule(op: Op, graph: Graph, operands: list[np.ndarray]) -> Rule:
    """Split every factor that may be split, alone, and hold the combined shards against the whole op."""
    rule = rule_for(op, graph)
    assert rule is not None
    operands = [np.asarray(operand) for operand in operands]
    for types, tensors in ((op.results, rule.results), ([graph.type_of(v) for v in op.operands], rule.operands)):
        assert len(types) == len(tensors)
        for kind, dims in zip(types, tensors, strict=True):
            for extent, factors in zip(kind.shape, dims, strict=True):
                sizes = [rule.factors[f].size for f in factors]
                assert math.prod(sizes) == extent or not factors or "halo" in {rule.factors[f].kind for f in factors}
                assert extent != 1 or not factors
    expected = evaluate(op, operands, whole(op, operands))
    for cut, factor in enumerate(rule.factors):
        if factor.kind in ("parallel", "reduce"):
            parts = next(p for p in range(2, factor.size + 1) if factor.size % p == 0)
            for got, want in zip(run_split(op, rule, operands, cut, parts), expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=f"{op.kind} factor {cut} of {rule}")
    return rule


def run_split(op: Op, rule: Rule, operands: list[np.ndarray], cut: int, parts: int) -> list[np.ndarray]:
    """The op's results put together from `parts` shards along factor `cut`."""
    factor = rule.factors[cut]
    per_part = []
    for part in range(parts):
        local = [take(rule, o, dims, cut, parts, part) for o, dims in zip(operands, rule.operands, strict=True)]
        if part and factor.kind == "reduce" and factor.reducer in IDENTITY:
            # Initial values count once.
            first = {"reduce": len(local) // 2, "scatter": 0}.get(op.kind, len(local))
            for i in range(first, len(local) if op.kind == "reduce" else min(first + 1, len(local))):
                local[i] = np.full_like(local[i], IDENTITY[factor.reducer])
        shapes = [result.shape for result in op.results]
        shard = Shard(
            tuple(o.shape for o in operands),
            tuple(start(rule, o.shape, d, cut, parts, part) for o, d in zip(operands, rule.operands, strict=True)),
            tuple(start(rule, s, d, cut, parts, part) for s, d in zip(shapes, rule.results, strict=True)),
            tuple(part_shape(rule, s, d, cut, parts) for s, d in zip(shapes, rule.results, strict=True)),
        )
        per_part.append(evaluate(op, local, shard))
    if factor.reducer == "gather":
        (dim,) = op.attrs["dims"]
        candidates = [np.stack(pieces, axis=dim) for pieces in zip(*per_part, strict=True)]
        whole_shapes = tuple(result.shape for result in op.results)
        return evaluate(op, candidates, Shard((), (), (), whole_shapes))
    combined = []
    for pieces, result, dims in zip(zip(*per_part, strict=True), op.results, rule.results, strict=True):
        sizes, place = view(rule, result.shape, dims, cut, parts)
        if place >= 0:
            joined = np.concatenate([piece.reshape(sizes) for piece in pieces], axis=place)
            combined.append(joined.reshape(result.shape))
        elif factor.kind == "reduce":
            combined.append(functools.reduce(COMBINE[factor.reducer or ""], pieces))
        else:
            for piece in pieces[1:]:
                np.testing.assert_array_equal(piece, pieces[0])
            combined.append(pieces[0])
    return combined


def kinds(rule: Rule, tensor: Any) -> list[list[str]]:
    """Per dim of one operand or result, the kinds of its factors."""
    return [[rule.factors[f].kind for f in dim] for dim in tensor]


def floats(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def check(
    kind: str, function: Callable[..., Any], *arrays: np.ndarray, operands: list[np.ndarray] | None = None
) -> Rule:
    """Check the rule of the op of `kind` in a jax function whose arguments that op reads."""
    graph = graph_of(function, *arrays)
    return check_rule(only(graph, kind), graph, list(arrays))


# ---- elementwise, constants ----------------------------------------------------------------------------------------


@few
@given(shapes)
def test_elementwise_dims_are_parallel(shape: tuple[int, ...]) -> None:
    rule = check("add", jnp.add, floats(shape), floats(shape, 1))
    assert all(factor.kind == "parallel" for factor in rule.factors)
    check("negate", jnp.negative, floats(shape))
    check("select", lax.select, floats(shape) > 0, floats(shape), floats(shape, 1))


@few
@given(shapes)
def test_scalar_operands_of_clamp_are_whole(shape: tuple[int, ...]) -> None:
    tensor = mlir(shape)
    graph = graph_from_text(
        f"func.func @main(%a: tensor<f32>, %x: {tensor}, %b: tensor<f32>) -> {tensor} {{"
        f"%0 = stablehlo.clamp %a, %x, %b : (tensor<f32>, {tensor}, tensor<f32>) -> {tensor} return %0 : {tensor} }}"
    )
    rule = check_rule(only(graph, "clamp"), graph, [np.float32(-1), floats(shape), np.float32(2)])
    assert rule.operands[0] == rule.operands[2] == ()


@few
@given(shapes, st.data())
def test_iota_is_free_in_every_sharding(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    rule = check("iota", lambda: lax.broadcasted_iota(jnp.int32, shape, dim))
    assert [factor.kind for factor in rule.factors] == ["parallel"] * sum(n > 1 for n in shape)


# ---- products and sums ---------------------------------------------------------------------------------------------


@few
@given(st.data())
def test_dot_general(data: st.DataObject) -> None:
    batch = data.draw(st.lists(extents, max_size=2))
    contract = data.draw(st.lists(extents, max_size=2))
    lhs_dims = [(f"b{i}", n) for i, n in enumerate(batch)] + [(f"k{i}", n) for i, n in enumerate(contract)]
    rhs_dims = list(lhs_dims)
    lhs_dims += [(f"m{i}", n) for i, n in enumerate(data.draw(st.lists(extents, max_size=2)))]
    rhs_dims += [(f"n{i}", n) for i, n in enumerate(data.draw(st.lists(extents, max_size=1)))]
    lhs_dims = data.draw(st.permutations(lhs_dims))
    rhs_dims = data.draw(st.permutations(rhs_dims))

    def places(dims: list[tuple[str, int]], letter: str, count: int) -> tuple[int, ...]:
        names = [name for name, _ in dims]
        return tuple(names.index(f"{letter}{i}") for i in range(count))

    numbers = tuple(
        tuple(places(dims, letter, count) for dims in (lhs_dims, rhs_dims))
        for letter, count in (("k", len(contract)), ("b", len(batch)))
    )
    lhs, rhs = floats(tuple(n for _, n in lhs_dims)), floats(tuple(n for _, n in rhs_dims), 1)
    rule = check("dot_general", lambda a, b: lax.dot_general(a, b, numbers), lhs, rhs)
    assert sorted(f.size for f in rule.factors if f.kind == "reduce") == sorted(n for n in contract if n > 1)


def test_plain_dot_arrives_as_dot_general() -> None:
    graph = graph_from_text(
        "func.func @main(%a: tensor<4x6xf32>, %b: tensor<6x2xf32>) -> tensor<4x2xf32> {"
        "%0 = stablehlo.dot %a, %b : (tensor<4x6xf32>, tensor<6x2xf32>) -> tensor<4x2xf32>"
        " return %0 : tensor<4x2xf32> }"
    )
    rule = check_rule(only(graph, "dot_general"), graph, [floats((4, 6)), floats((6, 2), 1)])
    m, k, n = rule.operands[0][0], rule.operands[0][1], rule.operands[1][1]
    assert rule.operands == ((m, k), (k, n))
    assert rule.results == ((m, n),)
    assert rule.factors[k[0]].kind == "reduce"


@few
@given(shapes, st.data(), st.sampled_from(["add", "max", "min", "mul", "and", "or"]))
def test_reduce(shape: tuple[int, ...], data: st.DataObject, reducer: str) -> None:
    dims = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    function = {"add": lax.add, "max": lax.max, "min": lax.min, "mul": lax.mul, "and": lax.bitwise_and}.get(reducer)
    operand = floats(shape) > 0 if reducer in ("and", "or") else floats(shape)
    initial = np.asarray(IDENTITY[reducer], operand.dtype)
    rule = check("reduce", lambda x, i: lax.reduce(x, i, function or lax.bitwise_or, dims), operand, initial)
    assert {f.reducer for f in rule.factors if f.kind == "reduce"} <= {reducer}
    assert sum(f.kind == "reduce" for f in rule.factors) == sum(shape[d] > 1 for d in dims)


@few
@given(shapes, st.data())
def test_argmax_gathers_its_candidates(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    values = floats(shape)
    indices = np.broadcast_to(np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)
    graph = graph_of(lambda x: jnp.argmax(x, axis=dim), values)
    if shape[dim] == 1:
        return
    rule = check_rule(only(graph, "reduce"), graph, [values, indices, np.float32(-np.inf), np.int32(0)])
    assert [f.reducer for f in rule.factors if f.kind == "reduce"] == ["gather"]


# ---- moving elements -----------------------------------------------------------------------------------------------


@few
@given(shapes, st.data())
def test_broadcast_in_dim(shape: tuple[int, ...], data: st.DataObject) -> None:
    rank = len(shape) + data.draw(st.integers(0, 2))
    dims = tuple(sorted(data.draw(st.permutations(range(rank)))[: len(shape)]))
    result = [data.draw(extents) for _ in range(rank)]
    for extent, dim in zip(shape, dims, strict=True):
        result[dim] = extent if extent > 1 else result[dim]
    graph = graph_from_text(
        f"func.func @main(%a: {mlir(shape)}) -> {mlir(result)} {{"
        f"%0 = stablehlo.broadcast_in_dim %a, dims = {list(dims)} : ({mlir(shape)}) -> {mlir(result)}"
        f" return %0 : {mlir(result)} }}"
    )
    rule = check_rule(only(graph, "broadcast_in_dim"), graph, [floats(shape)])
    assert len(rule.factors) == sum(n > 1 for n in result)


def mlir(shape: Any, dtype: str = "f32") -> str:
    return f"tensor<{''.join(f'{n}x' for n in shape)}{dtype}>"


@few
@given(shapes, st.data())
def test_transpose(shape: tuple[int, ...], data: st.DataObject) -> None:
    permutation = data.draw(st.permutations(range(len(shape))).filter(lambda p: p != sorted(p) or len(p) == 1))
    if len(shape) > 1:
        check("transpose", lambda x: lax.transpose(x, permutation), floats(shape))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=4), st.data())
def test_reshape(shape: list[int], data: st.DataObject) -> None:
    remaining, result = math.prod(shape), []
    while remaining > 1 and len(result) < 4:
        result.append(data.draw(st.sampled_from([d for d in range(1, remaining + 1) if remaining % d == 0])))
        remaining //= result[-1]
    result.append(remaining)
    graph = graph_from_text(
        f"func.func @main(%a: {mlir(shape)}) -> {mlir(result)} {{"
        f"%0 = stablehlo.reshape %a : ({mlir(shape)}) -> {mlir(result)} return %0 : {mlir(result)} }}"
    )
    check_rule(only(graph, "reshape"), graph, [floats(tuple(shape))])


@pytest.mark.parametrize(
    ("before", "after", "sizes", "operand", "result"),
    [
        ((8, 512, 768), (4096, 768), [8, 512, 768], ((0,), (1,), (2,)), ((0, 1), (2,))),
        ((4096, 768), (8, 512, 12, 64), [8, 512, 12, 64], ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))),
        ((8, 1, 512), (1, 8, 512, 1), [8, 512], ((0,), (), (1,)), ((), (0,), (1,), ())),
        ((2, 6), (4, 3), [2, 2, 3], ((0,), (1, 2)), ((0, 1), (2,))),
        ((4, 5), (20,), [4, 5], ((0,), (1,)), ((0, 1),)),
    ],
)
def test_reshape_factors_are_the_common_refinement(
    before: Any, after: Any, sizes: Any, operand: Any, result: Any
) -> None:
    rule = rule_of_reshape(before, after)
    assert [f.size for f in rule.factors] == sizes
    assert {f.kind for f in rule.factors} == {"parallel"}
    assert (rule.operands, rule.results) == ((operand,), (result,))


def test_reshape_that_regroups_keeps_only_what_divides() -> None:
    rule = rule_of_reshape((6, 4), (8, 3))
    assert kinds(rule, rule.operands[0]) == [["parallel", "replicated"], ["replicated"]]
    assert rule.factors[0].size == 2
    rule = rule_of_reshape((3, 4, 7), (4, 3, 7))
    assert kinds(rule, rule.operands[0]) == [["replicated"], ["replicated"], ["parallel"]]


def rule_of_reshape(before: Any, after: Any) -> Rule:
    graph = graph_from_text(
        f"func.func @main(%a: {mlir(before)}) -> {mlir(after)} {{"
        f"%0 = stablehlo.reshape %a : ({mlir(before)}) -> {mlir(after)} return %0 : {mlir(after)} }}"
    )
    rule = rule_for(only(graph, "reshape"), graph)
    assert rule is not None
    return rule


@few
@given(shapes, st.data())
def test_slice_keeps_whole_dims_parallel(shape: tuple[int, ...], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    limits = [data.draw(st.integers(s + 1, n)) for s, n in zip(starts, shape, strict=True)]
    strides = [data.draw(st.integers(1, 2)) for _ in shape]
    graph = graph_of(lambda x: lax.slice(x, starts, limits, strides), floats(shape))
    for op in graph.ops:
        if op.kind == "slice":
            rule = check_rule(op, graph, [floats(shape)])
            found = zip(shape, kinds(rule, rule.operands[0]), op.results[0].shape, starts, strides, strict=True)
            for extent, dims, result, start, stride in found:
                wanted = ["parallel"] if result == extent else ["replicated"]
                if stride > 1 and result * stride == extent and start < stride:
                    wanted = ["parallel", "replicated"] if result > 1 else ["replicated"]
                assert dims == ([] if extent == 1 else wanted)


@few
@given(shapes, st.data())
def test_pad_keeps_unpadded_dims_parallel(shape: tuple[int, ...], data: st.DataObject) -> None:
    config = [data.draw(st.sampled_from([(0, 0, 0), (1, 0, 0), (0, 2, 0), (0, 0, 1), (1, -1, 0)])) for _ in shape]
    if all(n + low + high > 0 for n, (low, high, _) in zip(shape, config, strict=True)):
        rule = check("pad", lambda x, v: lax.pad(x, v, config), floats(shape), np.float32(7))
        for extent, dims, edges in zip(shape, kinds(rule, rule.operands[0]), config, strict=True):
            assert dims == ([] if extent == 1 else ["replicated"] if any(edges) else ["parallel"])


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("place", [0, 1])
def test_every_other_element_is_split_with_what_it_is_of(every: int, place: int) -> None:
    """Interleaved gates and rotary embeddings, and their gradients."""
    rule = check("slice", lambda x: lax.slice(x, (0, place), (4, 4 * every), (1, every)), floats((4, 4 * every)))
    assert kinds(rule, rule.operands[0])[1] == ["parallel", "replicated"]
    edges = [(0, 0, 0), (place, every - 1 - place, every - 1)]
    rule = check("pad", lambda x, v: lax.pad(x, v, edges), floats((4, 4)), np.float32(0))
    assert kinds(rule, rule.operands[0])[1] == ["parallel"]
    assert kinds(rule, rule.results[0])[1] == ["parallel", "replicated"]


@few
@given(shapes, st.data())
def test_concatenate(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    other = (*shape[:dim], data.draw(extents), *shape[dim + 1 :])
    check("concatenate", lambda a, b: lax.concatenate([a, b], dim), floats(shape), floats(other, 1))


@few
@given(shapes, st.data())
def test_reverse_and_sort(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    check("reverse", lambda x: lax.rev(x, (dim,)), floats(shape))
    check("sort", lambda x: lax.sort(x, dimension=dim), floats(shape))


@few
@given(shapes, st.data())
def test_dynamic_slice_and_update(shape: tuple[int, ...], data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.integers(1, n)) for n in shape)
    starts = [np.int32(data.draw(st.integers(-1, 6))) for _ in shape]
    graph = graph_of(lambda x, *s: lax.dynamic_slice_p.bind(x, *s, slice_sizes=sizes), floats(shape), *starts)
    check_rule(only(graph, "dynamic_slice"), graph, [floats(shape), *starts])
    graph = graph_of(lax.dynamic_update_slice_p.bind, floats(shape), floats(sizes, 1), *starts)
    check_rule(only(graph, "dynamic_update_slice"), graph, [floats(shape), floats(sizes, 1), *starts])


# ---- indexing ------------------------------------------------------------------------------------------------------


@few
@given(st.integers(2, 9), extents, st.lists(extents, min_size=1, max_size=2), st.integers(0, 99))
def test_embedding_rows_are_partial_sums(rows: int, width: int, batch: list[int], seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, rows, (*batch, 1)).astype(np.int32)
    numbers = lax.GatherDimensionNumbers((len(batch),), (0,), (0,))
    function = functools.partial(lax.gather, dimension_numbers=numbers, slice_sizes=(1, width), mode="clip")
    graph = graph_of(function, floats((rows, width)), ids)
    rule = check_rule(only(graph, "gather"), graph, [floats((rows, width)), ids])
    assert kinds(rule, rule.operands[0])[0] == ["reduce"]
    assert rule.results[0] == (*rule.operands[1][:-1], rule.operands[0][1])


@few
@given(shapes, st.integers(0, 99), st.data())
def test_take_along_dim_is_parallel_in_batch_dims(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    shape = (4, *shape)
    picks = np.random.default_rng(seed).integers(0, shape[-1], (*shape[:-1], 1)).astype(np.int32)
    batch = tuple(range(len(shape) - 1))
    numbers = lax.GatherDimensionNumbers((), (len(batch),), (len(batch),), batch, batch)
    ones = (1,) * len(shape)
    function = functools.partial(lax.gather, dimension_numbers=numbers, slice_sizes=ones, mode="clip")
    graph = graph_of(function, floats(shape), picks)
    rule = check_rule(only(graph, "gather"), graph, [floats(shape), picks])
    assert kinds(rule, rule.operands[0])[0] == ["parallel"]
    assert rule.operands[0][:-1] == rule.results[0]


@few
@given(st.integers(0, 99), st.data())
def test_gather_of_partial_slices_and_two_indices(seed: int, data: st.DataObject) -> None:
    operand = floats((4, 6, 2))
    sizes = (1, data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 2])))
    indices = np.random.default_rng(seed).integers(-1, 5, (2, 3, 2)).astype(np.int32)
    numbers = lax.GatherDimensionNumbers((1, 3), (0,), (0, 1))
    function = functools.partial(lax.gather, dimension_numbers=numbers, slice_sizes=sizes, mode="clip")
    graph = graph_of(function, operand, indices)
    check_rule(only(graph, "gather"), graph, [operand, indices])


@few
@given(st.integers(2, 9), extents, st.integers(1, 6), st.integers(0, 99), st.sampled_from(["add", "max", "min", "mul"]))
def test_embedding_gradient(rows: int, width: int, tokens: int, seed: int, reducer: str) -> None:
    ids = np.random.default_rng(seed).integers(0, rows, (tokens, 1)).astype(np.int32)
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    function = {"add": lax.scatter_add, "max": lax.scatter_max, "min": lax.scatter_min, "mul": lax.scatter_mul}[reducer]
    arrays = [floats((rows, width)), ids, floats((tokens, width), 1)]
    graph = graph_of(lambda x, i, u: function(x, i, u, numbers, mode="promise_in_bounds"), *arrays)
    rule = check_rule(only(graph, "scatter"), graph, arrays)
    assert kinds(rule, rule.operands[0])[0] == ["parallel"]
    assert kinds(rule, rule.operands[2])[0] == (["reduce"] if tokens > 1 else [])
    assert {f.reducer for f in rule.factors} <= {None, reducer}


@few
@given(st.integers(0, 99), st.sampled_from(["assign", "add"]))
def test_scatter_with_batch_dims(seed: int, reducer: str) -> None:
    picks = np.random.default_rng(seed).integers(0, 6, (4, 2, 1)).astype(np.int32)
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    function = lax.scatter_add if reducer == "add" else lax.scatter
    arrays = [floats((4, 6)), picks, floats((4, 2), 1)]
    graph = graph_of(lambda x, i, u: function(x, i, u, numbers, mode="promise_in_bounds"), *arrays)
    rule = check_rule(only(graph, "scatter"), graph, arrays)
    assert kinds(rule, rule.operands[0]) == [["parallel"], ["parallel"]]
    assert kinds(rule, rule.operands[2]) == [["parallel"], ["reduce" if reducer == "add" else "replicated"]]


def _counted(rows: int, width: int, extent: int) -> np.ndarray:
    """Index vectors (row, choice): the first element counts up along the first dim."""
    choices = np.random.default_rng(rows).permuted(np.tile(np.arange(extent), (rows, 1)), axis=1)[:, :width]
    return np.stack([np.broadcast_to(np.arange(rows)[:, None], (rows, width)), choices], -1).astype(np.int32)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_dim_that_an_iota_indexes_is_parallel(kind: str) -> None:
    """What torch's gather along a dim and its gradient become: without it a router's top-k was replicated."""
    operand, indices = floats((4, 6)), _counted(4, 3, 6)

    def chosen(i: Any) -> Any:
        return jnp.concatenate([lax.broadcasted_iota(np.int32, (4, 3, 1), 0), i], 2)

    if kind == "gather":
        numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
        arrays = [operand, indices[..., 1:]]
        graph = graph_of(lambda x, i: lax.gather(x, chosen(i), numbers, (1, 1), mode="clip"), *arrays)
    else:
        numbers = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
        arrays = [operand, indices[..., 1:], floats((4, 3), 1)]
        graph = graph_of(lambda x, i, u: lax.scatter(x, chosen(i), u, numbers, mode="promise_in_bounds"), *arrays)
    (op,) = [op for op in graph.ops if op.kind == kind]
    assert op.attrs["parallel"] == ((0, 0),)
    rule = check_rule(op, graph, [arrays[0], indices, *arrays[2:]])
    assert kinds(rule, rule.operands[0])[0] == ["parallel"]
    assert rule.operands[0][0] == rule.operands[1][0]
    if kind == "scatter":
        assert kinds(rule, rule.operands[2]) == [["parallel"], ["replicated"]]


def test_an_iota_over_another_extent_is_not_parallel() -> None:
    def taken(x: Any) -> Any:
        return lax.gather(
            x, lax.broadcasted_iota(np.int32, (3, 1), 0), lax.GatherDimensionNumbers((), (0,), (0,)), (1,), mode="clip"
        )

    op = only(graph_of(taken, floats((4,))), "gather")
    assert op.attrs["parallel"] == ()


# ---- windows -------------------------------------------------------------------------------------------------------


@few
@given(st.data())
def test_convolution(data: st.DataObject) -> None:
    batch, spatial, taps = (data.draw(st.integers(1, n)) for n in (4, 6, 3))
    groups = data.draw(st.sampled_from([1, 2, 4]))
    batch_grouped = data.draw(st.booleans())
    per_in, per_out = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    stride, low, dilation = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    lhs_batch, lhs_features = (batch * groups, per_in) if batch_grouped else (batch, per_in * groups)
    lhs = floats((lhs_batch, lhs_features, spatial))
    rhs = floats((per_out * groups, per_in, taps), 1)
    if spatial + low + 1 < taps:
        return
    rule = check(
        "convolution",
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (stride,),
            [(low, 1)],
            lhs_dilation=(dilation,),
            feature_group_count=1 if batch_grouped else groups,
            batch_group_count=groups if batch_grouped else 1,
        ),
        lhs,
        rhs,
    )
    if groups > 1 and per_in > 1 and not batch_grouped:
        assert {factor.kind for factor in rule.factors} == {"replicated"}
        return
    assert kinds(rule, rule.operands[1])[1] == (["reduce"] if per_in > 1 else [])
    if groups > 1:
        assert rule.results[0][1][0] == rule.operands[1][0][0]
        assert rule.operands[0][0 if batch_grouped else 1][0] == rule.results[0][1][0]


@pytest.mark.parametrize(
    ("taps", "padding", "kind"), [(1, (0, 0), "parallel"), (3, (1, 1), "halo"), (30, (0, 0), "replicated")]
)
def test_spatial_dims_of_a_convolution(taps: int, padding: tuple[int, int], kind: str) -> None:
    graph = graph_of(
        lambda x, w: lax.conv_general_dilated(x, w, (1,), [padding]), floats((2, 3, 32)), floats((4, 3, taps))
    )
    rule = rule_for(only(graph, "convolution"), graph)
    assert rule is not None
    assert kinds(rule, rule.operands[0])[2] == [kind]


def test_pooling_and_cumulative_sums() -> None:
    pooled = graph_of(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"), floats((2, 3, 8, 8))
    )
    rule = rule_for(only(pooled, "reduce_window"), pooled)
    assert rule is not None
    assert kinds(rule, rule.operands[0]) == [["parallel"], ["parallel"], ["halo"], ["halo"]]
    summed = graph_of(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 8), (1, 1), ((0, 0), (7, 0))), floats((4, 8)))
    rule = rule_for(only(summed, "reduce_window"), summed)
    assert rule is not None
    assert kinds(rule, rule.operands[0]) == [["parallel"], ["replicated"]]


# ---- the rest ------------------------------------------------------------------------------------------------------

BATCH_NORM = """
func.func @main(%x: tensor<4x6x5xf32>, %s: tensor<6xf32>) -> tensor<4x6x5xf32> {
  %y, %m, %v = "stablehlo.batch_norm_training"(%x, %s, %s) {epsilon = 1.0e-5 : f32, feature_index = 1 : i64}
    : (tensor<4x6x5xf32>, tensor<6xf32>, tensor<6xf32>) -> (tensor<4x6x5xf32>, tensor<6xf32>, tensor<6xf32>)
  return %y : tensor<4x6x5xf32>
}
"""


def test_batch_norm_is_whole_as_it_is_compiled() -> None:
    graph = graph_from_text(BATCH_NORM)
    rule = rule_for(only(graph, "batch_norm_training"), graph)
    assert rule is not None
    assert {factor.kind for factor in rule.factors} == {"replicated"}


def test_random_bits_take_any_sharding_and_the_state_none() -> None:
    graph = graph_from_text(
        "func.func @main(%s: tensor<2xui64>) -> tensor<4x6xui32> {"
        "%n, %b = stablehlo.rng_bit_generator %s, algorithm = THREE_FRY :"
        " (tensor<2xui64>) -> (tensor<2xui64>, tensor<4x6xui32>) return %b : tensor<4x6xui32> }"
    )
    rule = rule_for(only(graph, "rng_bit_generator"), graph)
    assert rule is not None
    assert kinds(rule, rule.results[1]) == [["parallel"], ["parallel"]]
    assert kinds(rule, rule.operands[0]) == [["replicated"]]


TRIANGULAR_SOLVE = """
func.func @main(%a: tensor<4x6x6xf32>, %b: tensor<4x6x2xf32>) -> tensor<4x6x2xf32> {
  %0 = "stablehlo.triangular_solve"(%a, %b) {left_side = true, lower = true, unit_diagonal = false,
    transpose_a = #stablehlo<transpose NO_TRANSPOSE>} : (tensor<4x6x6xf32>, tensor<4x6x2xf32>) -> tensor<4x6x2xf32>
  return %0 : tensor<4x6x2xf32>
}
"""


def test_linear_algebra_is_gathered_even_along_batch_dims() -> None:
    graph = graph_from_text(TRIANGULAR_SOLVE)
    rule = rule_for(only(graph, "triangular_solve"), graph)
    assert rule is not None
    assert kinds(rule, rule.results[0]) == [["replicated"]] * 3


CUSTOM_CALL = """
func.func @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
  %0 = stablehlo.custom_call @my_softmax(%x) : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %0 : tensor<4x6xf32>
}
"""


def test_custom_calls_have_a_registry_that_users_extend() -> None:
    graph = graph_from_text(CUSTOM_CALL)
    op = only(graph, "custom_call")
    assert rule_for(op, graph) is None

    @autoshard.register_rule("my_softmax")
    def my_softmax(signature: Any) -> Rule:
        factors = Factors()
        dims = [*factors.dims(signature.operands[0][:-1]), factors.new(6, "replicated")]
        return factors.rule([dims], [dims])

    rule = rule_for(op, graph)
    forget_rule("my_softmax")
    assert rule_for(op, graph) is None
    assert rule is not None
    assert kinds(rule, rule.results[0]) == [["parallel"], ["replicated"]]


def custom(target: str, types: str, result: str) -> str:
    count = types.count("tensor")
    names = ", ".join(f"%x{i}" for i in range(count))
    arguments = ", ".join(f"%x{i}: {each}" for i, each in enumerate(types.split(", ")))
    return f"""
func.func @main({arguments}) -> {result} {{
  %0 = stablehlo.custom_call @{target}({names}) : ({types}) -> {result}
  return %0 : {result}
}}
"""


QKV = "tensor<2x8x32x16xf32>, tensor<2x8x64x16xf32>, tensor<2x8x64x16xf32>"


def test_a_custom_call_is_described_by_the_names_of_its_dims() -> None:
    graph = graph_from_text(custom("my_attention", QKV, "tensor<2x8x32x16xf32>"))
    op = only(graph, "custom_call")
    autoshard.register_rule("my_attention", "b h q d, b h k d, b h k d -> b h q d", whole="q k d")
    rule = rule_for(op, graph)
    autoshard.register_rule("my_attention", "b h q d, * , * -> b h q d", sums="", whole="q d", partitioned=False)
    unsplit = rule_for(op, graph)
    autoshard.register_rule("my_attention", "... d, d -> ... d")
    other_form = rule_for(op, graph)
    forget_rule("my_attention")
    assert rule is not None
    assert unsplit is not None
    assert other_form is None
    assert kinds(rule, rule.results[0]) == [["parallel"], ["parallel"], ["replicated"], ["replicated"]]
    assert rule.operands[1][:2] == rule.results[0][:2]
    assert rule.reason == ""
    assert kinds(unsplit, unsplit.results[0]) == [["replicated"]] * 4
    assert "gather" in unsplit.reason


def test_leading_dims_and_sums_of_a_custom_call() -> None:
    graph = graph_from_text(custom("my_dot", "tensor<4x6x8xf32>, tensor<8xf32>", "tensor<4x6xf32>"))
    autoshard.register_rule("my_dot", "... k, k -> ...", sums="k")
    rule = rule_for(only(graph, "custom_call"), graph)
    forget_rule("my_dot")
    assert rule is not None
    assert kinds(rule, rule.operands[0]) == [["parallel"], ["parallel"], ["reduce"]]
    assert rule.operands[1] == rule.operands[0][2:]
    assert rule.results[0] == rule.operands[0][:2]


@pytest.mark.parametrize(
    ("dims", "options", "said"),
    [
        ("b k, k b", {}, "arrow"),
        ("b k -> b", {}, "whole=, or in sums="),
        ("b b -> b", {}, "one name twice"),
        ("b -> b", {"whole": "k"}, "no tensor has a dim k"),
        ("b k -> b k", {"sums": "k"}, "cannot be summed over"),
        ("b ... -> b ...", {}, "comes first"),
    ],
)
def test_dims_that_do_not_fit_are_refused(dims: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        autoshard.register_rule("never", dims, **options)


def test_what_partitioners_gather_says_so() -> None:
    graph = graph_from_text(custom("tpu_custom_call", QKV, "tensor<2x8x32x16xf32>"))
    rule = rule_for(only(graph, "custom_call"), graph)
    assert rule is not None
    assert "gather" in rule.reason
    assert {factor.kind for factor in rule.factors} == {"replicated"}


def test_ops_without_a_rule_have_none() -> None:
    graph = graph_from_text(custom("my_softmax", "tensor<4x6xf32>", "tensor<4x6xf32>"))
    assert rule_for(only(graph, "custom_call"), graph) is None
    assert not has_rule("custom_call", "my_softmax")
    assert has_rule("custom_call", "tpu_custom_call")
    assert has_rule("add")


def test_a_loop_is_split_as_all_of_its_body_can_follow() -> None:
    def layer(carry: Any, weights: Any) -> Any:
        first, second = weights
        return carry + jnp.tanh(carry @ first) @ second, carry.sum(-1)

    graph = graph_of(lambda x, a, b: lax.scan(layer, x, (a, b)), floats((16, 4)), floats((5, 4, 8)), floats((5, 8, 4)))
    loop = only(graph, "while")
    rule = rule_for(loop, graph)
    assert rule is not None
    by_shape = {graph.type_of(value).shape: dims for value, dims in zip(loop.operands, rule.operands, strict=True)}
    rows, width = by_shape[16, 4]
    assert kinds(rule, (rows, width)) == [["parallel"], ["parallel"]]
    layers, inputs, hidden = by_shape[5, 4, 8]
    assert rule.factors[layers[0]].kind == "replicated"  # sliced by what the loop counts
    assert inputs == width
    assert by_shape[5, 8, 4][1:] == (hidden, width)
    assert by_shape[5, 16][1] == rows
    assert rule.results == rule.operands[: len(rule.results)]
    assert rule.reason == ""


def test_a_loop_that_turns_what_it_carries_lets_nothing_be_split() -> None:
    graph = graph_of(lambda x: lax.fori_loop(0, 3, lambda i, c: c @ c, x), floats((4, 4)))
    rule = rule_for(only(graph, "while"), graph)
    assert rule is not None
    assert "body" in rule.reason
    assert {factor.kind for factor in rule.factors} == {"replicated"}


def test_branches_are_split_as_both_allow() -> None:
    graph = graph_of(
        lambda p, x: lax.cond(p, lambda y: jnp.cumsum(y, 0), lambda y: y * 2, x), np.array(True), floats((4, 6))
    )
    rule = rule_for(only(graph, "case"), graph)
    assert rule is not None
    assert kinds(rule, rule.results[0]) == [["replicated"], ["parallel"]]
    assert rule.operands[0] == ()
    assert rule.operands[1] == rule.results[0]
