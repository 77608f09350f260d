"""The problem of a small program, solved, against every choice there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autoshard
from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.reshard.price import reshard_steps
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Status
from autoshard.solver.solve import solve
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.formulate import Formulation, _as_read, formulate
from autoshard.strategies.random_plans import random_annotations
from tests.graph.helpers import graph_of

jax = pytest.importorskip("jax")
jnp = jax.numpy

MESHES = [Mesh((4,), ("x",)), Mesh((8,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((2, 4), ("x", "y"))]
PROGRAMS = {
    "product": lambda x, w: x @ w,
    "layer": lambda x, w: jnp.tanh(x @ w),
    "residual": lambda x, w: x + x @ w,
    "normalised": lambda x, w: (x / x.sum(-1, keepdims=True)) @ w,
    "loss": lambda x, w: ((x @ w) ** 2).mean(),
}


def totals(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Objective and peak usage of every choice, as arrays with one dim per node."""
    sizes = [len(costs) for costs in problem.node_costs]

    def spread(values: np.ndarray, nodes: tuple[int, ...]) -> np.ndarray:
        order = np.argsort(nodes)
        values = values.transpose(order)
        return values.reshape([sizes[n] if n in nodes else 1 for n in range(len(sizes))])

    objective = np.zeros(sizes)
    for node, costs in enumerate(problem.node_costs):
        objective = objective + spread(costs, (node,))
    for edge, costs in zip(problem.edges, problem.edge_costs, strict=True):
        objective = objective + spread(costs, edge)
    used = [(u, (u.index,)) for u in problem.node_usages]
    used += [(u, tuple(problem.edges[u.index])) for u in problem.edge_usages]
    peak = np.zeros(sizes)
    for time in sorted({u.start for u, _ in used}):
        now = np.zeros(sizes)
        for usage, nodes in used:
            if usage.start <= time < usage.end:
                now = now + spread(usage.amount, nodes)
        peak = np.maximum(peak, now)
    return objective, peak


def formulated(program: str, rows: int, inner: int, mesh: Mesh, device: str, memory: float | None) -> Formulation:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, inner), (inner, inner))]
    return formulate(graph_of(PROGRAMS[program], *shapes), mesh, load_device(device), memory=memory)


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(PROGRAMS)),
    st.sampled_from([4, 16, 512]),
    st.sampled_from([8, 64, 1024]),
    st.sampled_from(MESHES),
    st.sampled_from(["cpu", "tpu-v5e", "h100"]),
    st.sampled_from([None, 1.5, 1.0, 0.9, 0.5]),
)
def test_the_solver_finds_what_trying_everything_finds(program, rows, inner, mesh, device, share):
    """`share`: the memory limit, as a part of what the best choice without a limit uses."""
    problem = formulated(program, rows, inner, mesh, device, 1e15).problem
    assume(np.prod([len(costs) for costs in problem.node_costs], dtype=float) < 4e6)
    objective, peak = totals(problem)
    limit = None
    if share is not None:
        limit = share * float(peak.ravel()[objective.argmin()])
        problem = formulated(program, rows, inner, mesh, device, limit).problem
        objective = np.where(peak <= limit, objective, np.inf)
    solution = solve(problem)
    if np.isinf(objective.min()):
        assert solution.status is Status.INFEASIBLE
        assert solution.least_usage is not None
        assert solution.least_usage.bound <= peak.min() <= solution.least_usage.reached
        return
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(objective.min(), rel=1e-9)
    assert objective[solution.choice] == pytest.approx(objective.min(), rel=1e-9)
    if limit is not None:
        assert evaluate(problem, solution.choice).peak <= limit


def test_a_hint_leaves_one_sharding():
    graph = graph_of(PROGRAMS["layer"], *(jax.ShapeDtypeStruct((16, 16), jnp.float32) for _ in range(2)))
    wanted = ((), ("x",))
    found = formulate(graph, MESHES[2], load_device("cpu"), hints={"arg1": wanted})
    annotations = found.annotations(solve(found.problem).choice)
    assert annotations.pins[Value(graph.arguments[1])] == wanted


def test_on_four_axes_strategies_stay_few_and_a_hint_may_order_axes_otherwise():
    text, mesh, device = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32), Mesh((2, 4, 4, 2)), load_device("cpu")
    graph = graph_of(jnp.matmul, text, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    found = formulate(graph, mesh, device)
    assert max(map(len, found.problem.node_costs)) < 450
    assert {len(specs.choices) for specs in found.argument_specs} == {163, 51}
    wanted = {"arg0": (("w", "data"), (), ("z",)), "arg1": ((), ("model", "data"))}
    hinted = formulate(graph, mesh, device, hints=wanted)
    annotations = hinted.annotations(solve(hinted.problem).choice)
    assert [annotations.pins[Value(op)] for op in graph.arguments] == [*wanted.values()]
    assert any((("w", "data"), (), ("z",)) in ways.inputs[0].choices for ways in hinted.strategies)


def test_a_sum_that_the_program_returns_as_it_is_cannot_be_scattered():
    import jax
    import jax.numpy as jnp

    from tests.graph.helpers import graph_of

    array = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    found = formulate(graph_of(jnp.matmul, array, array), Mesh((2, 4)), load_device("cpu"))
    kinds = {each.kind for row in found.strategies[0].collectives for each in row}
    assert kinds == {"all-reduce"}


def test_an_uneven_result_costs_its_gather():
    import jax.numpy as jnp

    wide, narrow = (jax.ShapeDtypeStruct((64, size), jnp.float32) for size in (4096, 4095))
    device = load_device("h100")
    even, uneven = (
        formulate(graph_of(lambda x, w: x @ w, jax.ShapeDtypeStruct((8, 64), jnp.float32), one), Mesh((8,)), device)
        for one in (wide, narrow)
    )

    def cost(found: Formulation) -> float:
        (columns,) = [
            s for s in range(len(found.strategies[0])) if found.strategies[0].outputs[0][s] == ((), ("data",))
        ]
        return float(found.problem.node_costs[2][columns])

    assert cost(uneven) > 1.5 * cost(even)


@pytest.mark.parametrize("kind", ["cpu", "h100"])
def test_no_copy_is_rematerialized_where_hops_avoid_it(kind: str) -> None:
    """Of random choices for a product: every copy's way, hop by hop, against the direct one."""
    mesh = Mesh((2, 4), ("x", "y"), kind)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096), (4096, 4096))]
    graph = labelled(graph_of(PROGRAMS["layer"], *shapes))
    target = load_device(kind).target
    direct, hopped = 0, 0
    for seed in range(40):
        annotations = random_annotations(graph, mesh, seed)
        for value, spec in {(value, spec) for (value, _), spec in annotations.copies.items()}:
            way = (annotations.pins[value], *annotations.chain(value, spec))
            assert not any(reshard_steps(a, b, mesh, target).rematerialized for a, b in itertools.pairwise(way))
            direct += reshard_steps(way[0], spec, mesh, target).rematerialized
            hopped += len(way) > 2
    assert direct > 5
    assert hopped >= direct


def labelled(graph: Graph) -> Graph:
    """`graph` with every op an aten op of its own, whose values can be annotated."""
    ops = tuple(replace(op, aten=op.id) if op.kind != "argument" else op for op in graph.ops)
    outputs = {(op.id, 0): Value(op.id) for op in ops if op.kind != "argument"}
    return replace(graph, ops=ops, aten_outputs=outputs)


def test_what_all_readers_take_the_same_part_of_is_scattered_as_that_part():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_xla")
    model = torch.nn.Sequential(torch.nn.Embedding(64, 16, padding_idx=0), torch.nn.Linear(16, 64, bias=False))
    model[1].weight = model[0].weight
    program = autoshard.capture(
        model,
        (torch.zeros(8, 4, dtype=torch.long),),
        loss_fn=lambda out: out.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    graph = build_graph(program)
    (scattered,) = (value for value in graph.aten_outputs.values() if graph.ops[value.op].kind == "scatter")
    whole, part, other = ((), ()), (("model",), ()), ((), ("model",))
    for read, pinned in (({1: part}, part), ({1: part, 2: part}, part), ({1: part, 2: other}, whole), ({}, whole)):
        pins = {scattered: whole}
        _as_read(graph, pins, {(scattered, aten): spec for aten, spec in read.items()})
        assert pins == {scattered: pinned}


def gradients(layer):
    """Of two layers."""

    def loss(x, w, v):
        return (layer(layer(x, w), v) ** 2).mean()

    return jax.grad(loss, (1, 2))


def of_layers(layer, rows: int, width: int, memory: float | None = None) -> Formulation:
    """The problem of the gradients of two layers 64 wide outside and `width` inside."""
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(rows, 64), (64, width), (64, width)]]
    graph = graph_of(gradients(layer), *shapes)
    return formulate(graph, Mesh((8,), ("x",), device="h100"), load_device("h100"), memory=memory)


def feed_forward(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w.T)


def test_a_barriers_operands_are_split_each_by_itself():
    """An axis may split the weights of a checkpoint and its activations."""
    formulation = of_layers(jax.checkpoint(feed_forward), 4096, 256)
    graph = formulation.graph
    passed = {
        value: graph.type_of(value).shape
        for group in formulation.groups.groups
        if group.operand_number is not None
        for value in group.outputs
    }
    assert set(passed.values()) == {(4096, 64), (64, 256)}
    assert solve(formulation.fixed(dict.fromkeys(passed, (("x",), ()))).problem).choice
    choice = solve(formulation.problem).choice
    nodes = [formulation.shardings_of(value) for value, shape in passed.items() if shape == (4096, 64)]
    assert {specs[choice[node]][0] for node, specs in nodes} == {("x",)}


@pytest.mark.parametrize(("rows", "width"), [(64, 4096), (4096, 1024)])
def test_what_a_checkpoint_computes_again_takes_no_more_memory(rows, width):
    """The weights that it passes on are held once, and its activations until the gradients are made of them."""
    peaks = []
    for layer in (feed_forward, jax.checkpoint(feed_forward)):
        formulation = of_layers(layer, rows, width, memory=1e12)
        whole = formulation.fixed(dict.fromkeys(formulation.argument_values, ((), ())))
        peaks.append(evaluate(formulation.problem, solve(whole.problem).choice).peak)
    assert peaks[1] <= peaks[0]


def test_what_is_gathered_before_a_barrier_is_kept_from_its_first_use():
    """A checkpoint's barrier took a copy of its own, which counted as held behind it only: lowering writes one copy."""
    formulation = of_layers(jax.checkpoint(feed_forward), 4096, 256, memory=1e12)
    problem, first = formulation.problem, len(formulation.argument_values)
    barriers = {first + group.id for group in formulation.groups.groups if group.operand_number is not None}
    copies = {len(problem.node_costs) - len(formulation.copies) + n: copy for n, copy in enumerate(formulation.copies)}
    read = {
        edge: (copies[tail], problem.edge_costs[edge])
        for edge, (tail, head) in enumerate(problem.edges)
        if tail in copies and head in barriers
    }
    assert read
    for copy, costs in read.values():
        own = costs[copy.same]
        assert np.isinf(own[:, 0]).sum() == len(own) - 1  # whole is read of what is whole alone


def test_what_a_barrier_passes_on_may_be_returned():
    def passed(x, y):
        made, kept = jax.lax.optimization_barrier((jnp.exp(x), y))
        return made, kept @ x

    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    mesh = Mesh((8,), ("x",), device="h100")
    formulation = formulate(graph_of(passed, *shapes), mesh, load_device("h100"), memory=1e12)
    ends = {usage.end for usage in formulation.problem.node_usages}
    assert solve(formulation.problem).choice
    assert max(ends) == len(formulation.groups.groups)


def test_what_only_a_parameters_gradient_reads_is_made_as_soon_as_it_can_be():
    """SwiGLU under a checkpoint: its product is made again for a gradient, which PyTorch computes after all others."""

    def late(x, w, v):
        h = x @ w
        y = h @ v
        for _ in range(3):
            y = jnp.sin(y) @ v
        return y, (jnp.exp(h) * h).T @ x

    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3
    mesh = Mesh((8,), ("x",), device="h100")
    formulation = formulate(graph_of(late, *shapes), mesh, load_device("h100"), memory=1e12)
    first = len(formulation.argument_values)
    (product,) = (group for group in formulation.groups.groups if group.id == 0)
    ends = [usage.end for usage in formulation.problem.node_usages if usage.index == first + product.id]
    assert max(ends) <= 3  # of some ten groups


def test_a_gathered_weight_is_held_behind_a_barrier_only_where_that_reads_it_gathered():
    formulation = of_layers(jax.checkpoint(feed_forward), 4096, 256, memory=1e12)
    problem, first = formulation.problem, len(formulation.argument_values)
    barriers = {first + group.id: group.id for group in formulation.groups.groups if group.operand_number is not None}
    copies = {len(problem.node_costs) - len(formulation.copies) + n: copy for n, copy in enumerate(formulation.copies)}
    behind = {edge: ends for edge, ends in enumerate(problem.edges) if ends[0] in copies and ends[1] in barriers}
    assert behind
    for copy, barrier in behind.values():
        assert all(usage.end <= barriers[barrier] for usage in problem.node_usages if usage.index == copy)
    held = {usage.index: usage.amount for usage in problem.edge_usages if usage.index in behind}
    for edge, amount in held.items():
        assert not amount[copies[problem.edges[edge][0]].same].any()
        assert amount.any()
    assert held


def test_a_sum_counts_whole_until_it_is_reduce_scattered():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024, bias=False), torch.nn.Tanh())
    graph, mesh = build_graph(autoshard.capture(model, torch.zeros(64, 64))), Mesh((8,), ("x",), device="h100")
    formulation = formulate(graph, mesh, load_device("h100"), memory=2**18)
    (node,) = (each.id for each in formulation.groups.groups if graph.ops[each.ops[0]].kind == "dot_general")
    scattered = [
        [each.kind for each in found] == ["reduce-scatter"] for found in formulation.strategies[node].collectives
    ]
    first = len(formulation.argument_values)
    used = sum(usage.amount for usage in formulation.problem.node_usages if usage.index == first + node)
    assert {*used[scattered]} == {64 * 1024 * 4 * (1 + 1 / 8)}
    assert used[np.invert(scattered)].max() == 64 * 1024 * 4
