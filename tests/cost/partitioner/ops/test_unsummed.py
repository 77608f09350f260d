"""Sums of products that are scattered once, held against the TPU's compiler."""

from __future__ import annotations

import pytest

from autoshard.cost.machine.compute import CONTRACTIONS
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target
from tests.graph.helpers import graph_from_text

MESH = Mesh((2, 4), ("data", "model"), device="tpu-v5e")
ROWS: Spec = (("data", "model"), ())
COLUMNS: Spec = ((), ("data", "model"))
WHOLE: Spec = ((), ())
SIZE = 4096


def sums(swapped: bool) -> Graph:
    """tanh(a b + c d + e f); `swapped`: the operands of both additions in the other order."""
    kind = f"tensor<{SIZE}x{SIZE}xf32>"
    mark = f'stablehlo.custom_call @Sharding(%{{}}) {{{{mhlo.sharding = "{{{{replicated}}}}"}}}} : ({kind}) -> {kind}'
    body = []
    for number, (left, right) in {0: "ab", 1: "cd", 3: "ef"}.items():
        body.append(
            f"%r{number} = stablehlo.dot_general %{left}, %{right}, contracting_dims = [1] x [0]"
            f' : ({kind}, {kind}) -> {kind} loc("op{number}")\n'
            f'%m{number} = {mark.format(f"r{number}")} loc("op{number}.out0")'
        )
    for number, (left, right) in {2: (0, 1), 4: (2, 3)}.items():
        left, right = (right, left) if swapped else (left, right)
        body.append(
            f'%r{number} = stablehlo.add %m{left}, %m{right} : {kind} loc("op{number}")\n'
            f'%m{number} = {mark.format(f"r{number}")} loc("op{number}.out0")'
        )
    body[2:] = [body[3], body[2], body[4]]
    arguments = ", ".join(f"%{name}: {kind}" for name in "abcdef")
    last = f'%r5 = stablehlo.tanh %m4 : {kind} loc("op5")\n%m5 = {mark.format("r5")} loc("op5.out0")'
    lines = "\n".join([*body, last])
    text = f"module {{ func.func public @main({arguments}) -> {kind} {{\n{lines}\nreturn %m5 : {kind} }} }}"
    names = ("mm", "mm", "add", "mm", "add", "tanh")
    ops = [AtenOp(k, name, "", "forward", (TensorType((SIZE, SIZE), "f32"),)) for k, name in enumerate(names)]
    return graph_from_text(text, ops=ops)


@pytest.mark.parametrize(
    ("swapped", "kernels"),
    [
        (False, [["add", "dot_general"], ["add", "dot_general"], ["dot_general"]]),
        (True, [["add", "add", "dot_general"], ["dot_general"], ["dot_general"]]),
    ],
)
def test_terms_of_a_scattered_sum_are_added_whole_in_the_kernels_of_their_products(
    swapped: bool, kernels: list[list[str]]
) -> None:
    """A sum goes on in the kernel that makes its last operand; nothing takes its part of a term before the sum."""
    pytest.importorskip("libtpu")
    graph = sums(swapped)
    made = {op: graph.aten_outputs[op, 0] for op in range(6)}
    pins = {Value(op): (COLUMNS, ROWS)[i % 2] for i, op in enumerate(graph.arguments)}
    pins |= {made[op]: WHOLE for op in (0, 1, 3)} | {made[op]: ROWS for op in (2, 4, 5)}
    wanted = Annotations(pins, {(made[term], op): ROWS for term, op in ((0, 2), (1, 2), (3, 4))})
    module = annotate(graph.program, graph, wanted, MESH)
    report, found = compare_compiled(graph, wanted, MESH, parse_target("tpu-v5e:2x4"), module)
    assert [(row.kind, row.predicted_bytes, row.compiled_bytes) for row in report.fidelity.rows] == [
        ("reduce-scatter", 4 * SIZE * SIZE, 4 * SIZE * SIZE)
    ]
    compiled = report.prediction.compiled
    kinds = [[compiled.program.steps[number].kind for number in kernel.steps] for kernel in compiled.kernels]
    assert sorted(sorted(each) for each in kinds if CONTRACTIONS.intersection(each)) == kernels
    assert sorted(_added(found.hlo_text)) == sorted(each.count("add") for each in kernels)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.01)


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "tpu-v5p:2x2x2", "h100:8"])
@pytest.mark.parametrize(
    "cut", [((), ("model", "data")), (("model", "data"), ()), ((), ("data",)), (("data",), ())], ids=str
)
def test_terms_that_are_reduced_and_cut_alike_are_reduced_once(target: str, cut: Spec) -> None:
    """Slices that no reduce-scatter makes: each of three products was reduced (Phi on v5p: 46 % of all bytes)."""
    pytest.importorskip("libtpu" if target.startswith("tpu") else "jax_plugins.xla_cuda12")
    mesh = Mesh((2, 4), ("data", "model"), device=target.partition(":")[0])
    graph = sums(swapped=False)
    made = {op: graph.aten_outputs[op, 0] for op in range(6)}
    pins = {Value(op): (COLUMNS, ROWS)[i % 2] for i, op in enumerate(graph.arguments)}
    pins |= {made[op]: WHOLE for op in (0, 1, 3)} | {made[op]: cut for op in (2, 4, 5)}
    wanted = Annotations(pins, {(made[term], op): cut for term, op in ((0, 2), (1, 2), (3, 4))})
    module = annotate(graph.program, graph, wanted, mesh)
    report, _ = compare_compiled(graph, wanted, mesh, parse_target(target, 8), module)
    assert [(row.kind, row.predicted_bytes, row.compiled_bytes) for row in report.fidelity.rows] == [
        ("all-reduce", 4 * SIZE * SIZE, 4 * SIZE * SIZE)
    ]


def _added(text: str) -> list[int]:
    """Of every kernel with a product in a compiled program, how many additions it holds."""
    kernels = (part for part in text.split("\n\n") if " convolution(" in part)
    return [part.count(" add(") for part in kernels]
