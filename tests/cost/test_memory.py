"""Liveness memory on programs small enough to count by hand."""

from __future__ import annotations

import dataclasses
import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.capture.program import Argument, Output, Program, TensorType
from autoshard.cost.memory import live_interval, peak_memory, value_bytes
from autoshard.graph.groups import fusion_groups
from autoshard.graph.ops import Graph, Op, Value
from autoshard.mesh import Mesh

MESH = Mesh((2, 4), ("x", "y"))


def graph_from(ops: list[Op], outputs: list[Value], updates: list[int | None] | None = None) -> Graph:
    """A graph of hand-written ops; `updates[i]` is the argument that output i replaces."""
    arguments = [op for op in ops if op.kind == "argument"]
    edges = nx.DiGraph()
    edges.add_nodes_from(op.id for op in ops)
    edges.add_edges_from((value.op, op.id) for op in ops for value in op.operands)
    types = [ops[value.op].results[value.result] for value in outputs]
    program = Program(
        "train",
        "torch_xla",
        {},
        (),
        b"",
        tuple(Argument(f"arg{i}", "parameter", op.results[0]) for i, op in enumerate(arguments)),
        tuple(
            Output(f"out{i}", "output", kind, replaces)
            for i, (kind, replaces) in enumerate(zip(types, updates or [None] * len(outputs), strict=True))
        ),
        (),
    )
    return Graph(program, edges, tuple(ops), tuple(op.id for op in arguments), tuple(outputs), {})


def op(number: int, kind: str, operands: list[int], shape: tuple[int, ...] = (8, 8), dtype: str = "f32") -> Op:
    return Op(number, kind, tuple(Value(i) for i in operands), (TensorType(shape, dtype),))


def chain(updates: int | None = None) -> Graph:
    """a -> dot b -> dot c -> dot d; each 256 bytes."""
    ops = [op(0, "argument", []), *(op(i, "dot_general", [i - 1, i - 1]) for i in (1, 2, 3))]
    return graph_from(ops, [Value(3)], [updates])


def test_a_value_lives_from_its_producer_to_its_last_reader() -> None:
    assert live_interval(chain()) == {Value(0): (0, 4), Value(1): (1, 3), Value(2): (2, 4), Value(3): (3, 4)}
    profile = peak_memory(chain(), {}, MESH)
    assert profile.timeline.tolist() == [256, 512, 768, 768]
    assert (profile.peak_bytes, profile.at_op, profile.arguments_bytes) == (768, 2, 256)
    assert profile.live == ((Value(0), 256), (Value(1), 256), (Value(2), 256))


def test_a_donated_argument_is_counted_once() -> None:
    profile = peak_memory(chain(updates=0), {}, MESH)
    assert Value(3) not in live_interval(chain(updates=0))
    assert profile.timeline.tolist() == [256, 512, 768, 512]


def test_shards_and_their_padding() -> None:
    assert value_bytes((8, 8), "f32", (("x",), ("y",)), MESH) == 4 * 2 * 4
    assert value_bytes((50257, 3), "bf16", (("x", "y"), ()), MESH) == 6283 * 3 * 2
    specs = {Value(i): (("x", "y"), ()) for i in range(4)}
    assert peak_memory(chain(), specs, MESH).peak_bytes == 768 // 8


def test_temporaries_count_at_their_op_alone() -> None:
    profile = peak_memory(chain(), {}, MESH, temporaries=[(1, 1000), (1, 24.5)])
    assert profile.timeline.tolist() == [256, 512 + 1025, 768, 768]
    assert (profile.peak_bytes, profile.at_op, profile.temporaries_bytes) == (1537, 1, 1025)


def test_values_inside_a_group_are_never_in_memory() -> None:
    ops = [op(0, "argument", []), *(op(i, "negate", [i - 1]) for i in (1, 2, 3)), op(4, "dot_general", [3, 0])]
    graph = graph_from(ops, [Value(4)])
    groups = fusion_groups(graph)
    assert live_interval(graph, groups=groups) == {Value(0): (0, 5), Value(3): (3, 5), Value(4): (4, 5)}
    assert peak_memory(graph, {}, MESH, groups=groups).peak_bytes == 768
    assert live_interval(graph, {Value(1)}, groups).keys() == {Value(0), Value(1)}


def test_a_group_runs_where_its_last_op_is() -> None:
    # b = exp(a @ a), read by the group (c, e), whose last op comes after an unrelated dot.
    ops = [
        op(0, "argument", []),
        op(1, "dot_general", [0, 0]),
        op(2, "negate", [1]),
        op(3, "dot_general", [0, 0]),
        op(4, "add", [2, 3]),
    ]
    graph = graph_from(ops, [Value(4)])
    assert live_interval(graph, groups=fusion_groups(graph))[Value(1)] == (1, 5)


def test_a_reshape_shares_its_operands_buffer() -> None:
    ops = [
        op(0, "argument", []),
        op(1, "dot_general", [0, 0]),
        op(2, "reshape", [1], (64,)),
        op(3, "dot_general", [0, 0]),
        op(4, "dot_general", [2, 2], ()),
    ]
    graph = graph_from(ops, [Value(4)])
    assert live_interval(graph)[Value(1)] == (1, 5)
    assert Value(2) not in live_interval(graph, groups=fusion_groups(graph))


def test_constants_are_made_where_they_are_read() -> None:
    ops = [op(0, "argument", []), op(1, "constant", []), op(2, "broadcast_in_dim", [1]), op(3, "dot_general", [0, 2])]
    assert live_interval(graph_from(ops, [Value(3)])).keys() == {Value(0), Value(3)}


def random_graph(picks: list[tuple[int, int]], kinds: list[str]) -> Graph:
    ops = [op(0, "argument", []), op(1, "argument", [], (4, 6))]
    for (a, b), kind in zip(picks, kinds, strict=False):
        operands = [a % len(ops)] if kind == "negate" else [a % len(ops), b % len(ops)]
        ops.append(op(len(ops), kind, operands, ((a * 7 + b) % 9 + 1, 8)))
    return graph_from(ops, [Value(len(ops) - 1)])


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=30),
    st.lists(st.sampled_from(["dot_general", "negate", "add", "reshape"]), min_size=30, max_size=30),
)
def test_the_timeline_is_the_sum_of_what_is_live(picks: list[tuple[int, int]], kinds: list[str]) -> None:
    graph = random_graph(picks, kinds)
    for groups in (None, fusion_groups(graph)):
        intervals = live_interval(graph, groups=groups)
        profile = peak_memory(graph, {}, MESH, groups=groups)
        for at in range(len(graph.ops)):
            live = [value for value, (start, end) in intervals.items() if start <= at < end]
            sizes = [int(np.prod(graph.type_of(value).shape)) * 4 for value in live]
            assert profile.timeline[at] == sum(sizes)
        assert profile.peak_bytes == profile.timeline.max() == sum(size for _, size in profile.live)


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=30),
    st.lists(st.sampled_from(["dot_general", "negate", "add"]), min_size=30, max_size=30),
)
def test_fusing_never_adds_values(picks: list[tuple[int, int]], kinds: list[str]) -> None:
    graph = random_graph(picks, kinds)
    assert live_interval(graph, groups=fusion_groups(graph)).keys() <= live_interval(graph).keys()


def test_ten_thousand_ops_are_quick() -> None:
    ops = [op(0, "argument", [])]
    ops += [op(i, "dot_general", [i - 1, max(0, i - 50)]) for i in range(1, 10_000)]
    graph = graph_from(ops, [Value(9_999)])
    specs = {Value(i): (("x",), ("y",)) for i in range(10_000)}
    start = time.process_time()
    peak_memory(graph, specs, MESH)
    assert time.process_time() - start < 0.5  # a tenth of it on an idle machine


def test_a_wrong_output_count_is_refused() -> None:
    graph = chain()
    program = dataclasses.replace(graph.program, outputs=())
    with pytest.raises(ValueError, match="zip"):
        live_interval(dataclasses.replace(graph, program=program))
