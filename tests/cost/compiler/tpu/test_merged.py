"""Equal ops that are annotated alike, held against the compilers: a TPU's moves them once."""

from __future__ import annotations

import pytest

from autoshard.cost.partitioner.passes.merge import equal_ops, merged
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target
from tests.graph.helpers import graph_from_text

ROWS: Spec = (("data", "model"), ())
COLUMNS: Spec = ((), ("data", "model"))
WHOLE: Spec = ((), ())
MARK = 'stablehlo.custom_call @Sharding(%{}) {{mhlo.sharding = "{{replicated}}"}} : ({}) -> {}'
X, SUM = "tensor<512x256xf32>", "tensor<512xf32>"
KINDS = ("exp", "scaled", "exp", "scaled", "divided", "divided")


def twice() -> Graph:
    """exp(x) * s and exp(x) * s again, what the rows of the one and the columns of the other are divided by."""
    lines = []
    for first in (0, 2):
        lines += [
            f'%r{first} = stablehlo.exponential %x : {X} loc("op{first}")',
            f'%m{first} = {MARK.format(f"r{first}", X, X)} loc("op{first}.out0")',
            f'%r{first + 1} = stablehlo.multiply %m{first}, %s : {X} loc("op{first + 1}")',
            f'%m{first + 1} = {MARK.format(f"r{first + 1}", X, X)} loc("op{first + 1}.out0")',
        ]
    for last, read in ((4, 1), (5, 3)):
        lines += [
            f'%r{last} = stablehlo.divide %m{read}, %y{last} : {X} loc("op{last}")',
            f'%m{last} = {MARK.format(f"r{last}", X, X)} loc("op{last}.out0")',
        ]
    body = "\n".join(lines)
    text = f"""module {{ func.func public @main(%x: {X}, %s: {X}, %y4: {X}, %y5: {X}) -> ({X}, {X}) {{
{body}
return %m4, %m5 : {X}, {X} }} }}"""
    ops = [AtenOp(k, name, "", "forward", (TensorType((512, 256), "f32"),)) for k, name in enumerate(KINDS)]
    return graph_from_text(text, ops=ops)


def pinned(graph: Graph, first: Spec, again: Spec) -> Annotations:
    """The product made by columns, and kept under `first` and `again`; the rest by columns."""
    x, s, y, z = (Value(op) for op in graph.arguments)
    made = {aten: value for (aten, _), value in graph.aten_outputs.items()}
    pins = {x: COLUMNS, s: COLUMNS, y: WHOLE, z: WHOLE, made[0]: COLUMNS, made[1]: first, made[2]: COLUMNS}
    return Annotations(pins | {made[3]: again, made[4]: WHOLE, made[5]: ROWS})


@pytest.mark.parametrize("again", [WHOLE, ROWS])
@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "cpu"])
def test_equal_ops_that_are_annotated_alike_are_moved_once_on_a_tpu(again: Spec, target: str) -> None:
    if target != "cpu":
        pytest.importorskip("libtpu")
    graph, mesh = twice(), Mesh((2, 4), ("data", "model"), device=target.partition(":")[0])
    wanted = pinned(graph, WHOLE, again)
    module = annotate(graph.program, graph, wanted, mesh)
    report, _ = compare_compiled(graph, wanted, mesh, parse_target(target, 8), module)
    gathers = [one for one in report.prediction.collectives if one.kind == "all-gather"]
    assert report.fidelity.value == 0
    assert len(gathers) == (1 if again == ROWS or target != "cpu" else 2)


def test_what_reads_merged_values_reads_the_first() -> None:
    graph = twice()
    made = {aten: value for (aten, _), value in graph.aten_outputs.items()}
    wanted = pinned(graph, WHOLE, WHOLE)
    equal = equal_ops(graph, wanted)
    assert equal == {made[2]: made[0], made[3]: made[1]}
    smaller, annotations = merged(graph, wanted, equal)
    assert smaller.ops[made[5].op].operands[0] == made[1]
    assert not set(annotations.pins) & set(equal)
    assert [op.id for op in smaller.ops] == list(range(len(graph.ops)))
    assert set(smaller.nx.predecessors(made[5].op)) == {value.op for value in smaller.ops[made[5].op].operands}


def test_values_pinned_otherwise_or_read_otherwise_by_one_consumer_are_not_merged() -> None:
    graph = twice()
    made = {aten: value for (aten, _), value in graph.aten_outputs.items()}
    assert equal_ops(graph, pinned(graph, WHOLE, ROWS)) == {made[2]: made[0]}
    read = pinned(graph, WHOLE, WHOLE)
    copies = {(made[0], 1): ROWS}  # the first is multiplied by rows, the second as it is
    assert equal_ops(graph, Annotations(read.pins, copies)) == {made[2]: made[0]}


def test_of_three_equal_values_none_is_merged_that_a_consumer_of_another_reads_otherwise() -> None:
    """The second and the third are read by one op, under two shardings, the first by none of its kind."""
    kinds = ("exp", "exp", "exp", "added", "scaled")
    text = f"""module {{ func.func public @main(%x: {X}) -> ({X}, {X}) {{
%r0 = stablehlo.exponential %x : {X} loc("op0")
%r1 = stablehlo.exponential %x : {X} loc("op1")
%r2 = stablehlo.exponential %x : {X} loc("op2")
%r3 = stablehlo.add %r1, %r2 : {X} loc("op3")
%r4 = stablehlo.multiply %r0, %x : {X} loc("op4")
return %r4, %r3 : {X}, {X} }} }}"""
    ops = [AtenOp(k, name, "", "forward", (TensorType((512, 256), "f32"),)) for k, name in enumerate(kinds)]
    graph = graph_from_text(text, ops=ops)
    first, second, third = (Value(op.id) for op in graph.ops if op.kind == "exponential")
    wanted = Annotations({}, {(second, 3): ROWS, (third, 3): WHOLE})
    equal = equal_ops(graph, wanted)
    assert equal == {second: first}
    _, annotations = merged(graph, wanted, equal)
    assert annotations.copies == {(first, 3): ROWS, (third, 3): WHOLE}
