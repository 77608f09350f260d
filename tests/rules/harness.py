"""Cases of many op kinds in one program, each under a random strategy: counted, predicted, compiled, and run.

A case is named by (rule, seed): the same shapes, mesh and strategy each time. Cases in one program share nothing but
the module; the labels of aten ops say which case a collective belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.targets import Target
from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, format_spec
from autoshard.program import Argument, AtenOp, Output, Program
from autoshard.solver.problem import Problem
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.formulate import Formulation, _Builder
from autoshard.strategies.space import Partial, Strategies, plain
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.compile import compile_module
from autoshard.verify.hlo_text import Module, parse_hlo
from autoshard.verify.targets import parse_target
from tests.rules import snippets_body, snippets_moves, snippets_ops
from tests.rules.snippets import BUILDERS, Body, Draw, Fill

FAMILIES = (snippets_body, snippets_moves, snippets_ops)
"""Modules whose import fills `BUILDERS`."""

TORCH = "torch."
MESHES = ((2, 4), (8,), (2, 2, 2), (4, 2))
DEVICES = {"cpu": "cpu", "h100:8": "h100", "tpu-v5e:2x4": "tpu-v5e"}
"""Compile target -> device kind of the mesh."""

COMBINERS = (
    "all-gather-combiner,all-reduce-combiner,reduce-scatter-combiner,collective-permute-combiner,all-to-all-combiner,"
    "cpu-all-gather-combiner,gpu-all-gather-combiner,gpu-all-reduce-combiner,gpu-reduce-scatter-combiner"
)

Bytes = dict[str, int]
"""`kind axes` -> bytes per device."""


@dataclass(frozen=True)
class Case:
    """One case: a rule and a seed, which decides everything else."""

    rule: str
    seed: int

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Its mesh."""
        return MESHES[self.seed % len(MESHES)]

    def __str__(self) -> str:
        """`dot_general:12`."""
        return f"{self.rule}:{self.seed}"


@dataclass
class Row:
    """What came of one case.

    Attributes:
        counted: what the strategies' costs counted, or None where a value is resharded too: between two strategies, or
            because a program returns no uneven parts.
        predicted: for the annotations.
        compiled: by the target's compiler.
        strategy: the shardings, for a person.
        numbers: largest difference to the unsharded numbers, relative to the largest; None where it was not run.
        tolerance: what rounding explains of `numbers`.
        error: what the compiler said where it refused the case.
    """

    case: Case
    counted: Bytes | None = None
    predicted: Bytes = field(default_factory=dict)
    compiled: Bytes = field(default_factory=dict)
    strategy: str = ""
    numbers: float | None = None
    tolerance: float = 0.0
    error: str = ""

    @property
    def agrees(self) -> bool:
        """Whether prediction and program have the same collectives."""
        return self.predicted == self.compiled and not self.error

    @property
    def counts(self) -> bool:
        """Whether the strategies' costs counted what was compiled."""
        return self.counted is None or self.counted == self.compiled

    @property
    def equal(self) -> bool:
        """Whether the numbers are right."""
        return self.numbers is None or self.numbers <= self.tolerance

    def wrong(self, said: Bytes) -> int:
        """Bytes said and not compiled, or compiled and not said."""
        return sum(abs(said.get(key, 0) - self.compiled.get(key, 0)) for key in {*said, *self.compiled})

    def __str__(self) -> str:
        """For a person."""
        return (
            f"{self.case} on {'x'.join(map(str, self.case.mesh_shape))}: {self.strategy}\n  counted {self.counted}\n"
            f"  predicted {self.predicted}\n  compiled {self.compiled}"
            + (f"\n  numbers differ by {self.numbers:.1e}" if not self.equal and self.numbers is not None else "")
            + (f"\n  {self.error}" if self.error else "")
        )


@dataclass(frozen=True)
class Batch:
    """Cases in one program.

    Attributes:
        owner: op id -> place in `cases`.
        fills: how each argument's numbers are drawn.
        approximate: per case the largest difference that rounding may make.
    """

    cases: tuple[Case, ...]
    mesh: Mesh
    program: Program
    graph: Graph
    owner: Mapping[int, int]
    fills: tuple[Fill, ...]
    approximate: tuple[float, ...]
    annotations: Annotations
    counted: tuple[Bytes | None, ...]
    strategy: tuple[str, ...]

    @property
    def module(self) -> bytes:
        """The annotated module."""
        return annotate(self.program, self.graph, self.annotations, self.mesh)

    @property
    def of_aten(self) -> dict[int, int]:
        """Aten op -> place in `cases`."""
        ops = [op for op in self.graph.ops if op.id in self.owner and op.aten is not None]
        return {op.aten: self.owner[op.id] for op in ops if op.aten is not None}


@dataclass(frozen=True)
class Written:
    """Programs of cases: one module, and whose each argument is."""

    program: Program
    arguments: tuple[int, ...]
    fills: tuple[Fill, ...]
    approximate: tuple[float, ...]


def batch_of(cases: Sequence[Case], device: str = "cpu", scale: int = 1) -> Batch:
    """The program of some cases of one mesh, annotated by a random strategy of each; PyTorch's are not mixed in."""
    (shape,) = {case.mesh_shape for case in cases}
    mesh = Mesh(shape, device=device)
    written = torch_program(cases) if cases[0].rule.startswith(TORCH) else snippets_program(cases, scale)
    graph = build_graph(written.program)
    owner = _owners(graph, written.arguments)
    annotations, counted, strategy = _choose(graph, mesh, cases, owner)
    fills, approximate = written.fills, written.approximate
    return Batch(tuple(cases), mesh, written.program, graph, owner, fills, approximate, annotations, counted, strategy)


def _owners(graph: Graph, arguments: Sequence[int]) -> dict[int, int]:
    """The case of every op, by the arguments that it depends on, else by what reads it."""
    owner = dict(zip(graph.arguments, arguments, strict=True))
    for op in graph.ops:
        known = [owner[value.op] for value in op.operands if value.op in owner]
        if known:
            owner[op.id] = known[0]
    for op in reversed(graph.ops):
        if op.id in owner:
            owner.update({value.op: owner[op.id] for value in op.operands if value.op not in owner})
    return owner


def snippets_program(cases: Sequence[Case], scale: int = 1) -> Written:
    """The program of cases whose rules have a builder."""
    bodies: list[Body] = []
    first = 0
    for place, case in enumerate(cases):
        body = Body(f"c{place}", first)
        BUILDERS[case.rule](body, Draw(case.rule, case.seed, scale))
        bodies.append(body)
        first += len(body.outputs)
    return Written(
        _program(bodies),
        tuple(place for place, body in enumerate(bodies) for _ in body.arguments),
        tuple(fill for body in bodies for _, fill in body.arguments),
        tuple(body.approximate for body in bodies),
    )


def torch_program(cases: Sequence[Case]) -> Written:
    """What PyTorch and torch_xla make of cases named `torch.NAME` or `torch.NAME.backward`."""
    from autoshard.frontends.torch_xla.program import capture
    from tests.rules.torch_cases import Cases, gradient_of
    from tests.rules.torch_forms import FUNCTIONS

    drawn, backward, inputs, owner = [], [], [], []
    for place, case in enumerate(cases):
        _, name, *rest = case.rule.split(".")
        drawn.append(FUNCTIONS[name](random.Random(f"{name}:{case.seed}")))
        backward.append(bool(rest))
        mine = [*drawn[-1].inputs, *([gradient_of(drawn[-1])] if rest else [])]
        inputs += mine
        owner += [place] * len(mine)
    program = capture(Cases(drawn, backward), tuple(each.tensor for each in inputs))
    names = {f"input{i}": i for i in range(len(inputs))}
    given = [names.get(argument.name) for argument in program.arguments]
    return Written(
        program,
        tuple(0 if i is None else owner[i] for i in given),
        tuple(
            Fill("one") if i is None else Fill("ints", inputs[i].below) if inputs[i].below else Fill() for i in given
        ),
        (1e-4,) * len(cases),
    )


def _program(bodies: Sequence[Body]) -> Program:
    refs = [ref for body in bodies for ref, _ in body.arguments]
    returned = [ref for body in bodies for ref in body.returned]
    kinds = ", ".join(ref.text for ref in returned)
    lines = "\n    ".join(line for body in bodies for line in body.lines)
    text = (
        f"module @cases {{\n  func.func @main({', '.join(f'{ref.name}: {ref.text}' for ref in refs)}) -> ({kinds}) {{\n"
        f"    {lines}\n    return {', '.join(ref.name for ref in returned)} : {kinds}\n  }}\n}}"
    )
    arguments = tuple(Argument(ref.name.lstrip("%"), "input", ref.type) for ref in refs)
    outputs = tuple(Output(ref.name.lstrip("%"), "output", ref.type) for ref in returned)
    made = [(name, types) for body in bodies for name, types in body.outputs]
    atens = tuple(AtenOp(i, name, "", "forward", types) for i, (name, types) in enumerate(made))
    return Program("forward", "torch_xla", {}, (), text.encode(), arguments, outputs, atens)


# ---- a strategy for each group -------------------------------------------------------------------------------------


def _choose(
    graph: Graph, mesh: Mesh, cases: Sequence[Case], owner: Mapping[int, int]
) -> tuple[Annotations, tuple[Bytes | None, ...], tuple[str, ...]]:
    builder = _Builder(graph, mesh, load_device(mesh.device), {}, {})
    arguments = builder._arguments()
    ways = tuple(builder._groups())
    groups = builder.groups
    draws = [random.Random(f"strategy:{case}") for case in cases]
    nodes = list(arguments)
    choice = [0] * len(nodes)
    place_of = {value: i for i, value in enumerate(nodes)}
    handed: dict[Value, Any] = {}  # value -> its sharding as readers find it
    counted: list[Bytes | None] = [{} for _ in cases]
    spoken: list[list[str]] = [[] for _ in cases]
    spread = set(nodes)
    for group, own in zip(groups.groups, ways, strict=True):
        case = owner[group.ops[-1]]
        chosen = _strategy(draws[case], group.inputs, own, handed)
        for position, value in enumerate(group.inputs):
            wanted = own.inputs[position][chosen]
            if value in handed:
                if handed[value] != wanted:
                    counted[case] = None  # resharded between two strategies
            elif value in place_of and plain(wanted) in arguments[value].choices:
                choice[place_of[value]] = arguments[value].choices.index(plain(wanted))
                handed[value] = wanted
                spread.discard(value)
            else:
                handed[value] = None
                counted[case] = None
        for value, specs in zip(group.outputs, own.outputs, strict=True):
            handed[value] = specs[chosen]
        choice.append(chosen)
        total = counted[case]
        if total is not None:
            for each in own.collectives[chosen]:
                key = f"{each.kind} {'+'.join(each.axes)}"
                total[key] = total.get(key, 0) + each.bytes * each.count
        kinds = "+".join(graph.ops[op].kind for op in group.ops)
        reads = " ".join(format_spec(own.read(i, chosen)) or "scalar" for i in range(len(group.inputs)))
        makes = " ".join(_spoken(pin[chosen], out[chosen]) for pin, out in zip(own.pinned, own.outputs, strict=True))
        spoken[case].append(f"{kinds}({reads}) -> {makes}")
    for value in graph.outputs:
        case = owner.get(value.op)
        spec = handed.get(value)
        if (
            case is not None
            and spec is not None
            and any(size % mesh.ways(axes) for size, axes in zip(graph.type_of(value).shape, plain(spec), strict=True))
        ):
            counted[case] = None  # a program does not return uneven parts
    for value in spread:  # what no group reads, or reads in one way only
        choice[place_of[value]] = 0
    problem = Problem([], [], [])
    formulation = Formulation(problem, graph, groups, tuple(arguments), tuple(arguments.values()), ways, ())
    return formulation.annotations(choice), tuple(counted), tuple("; ".join(lines) for lines in spoken)


def _spoken(pinned: Any, out: Any) -> str:
    if isinstance(out, Partial):
        return f"{format_spec(out.spec)} partial over {'+'.join(out.axes)}"
    return format_spec(pinned) + ("" if out == pinned else f" scattered to {format_spec(out)}")


def _strategy(draw: random.Random, inputs: Sequence[Value], own: Strategies, handed: dict[Value, Any]) -> int:
    """One that takes its inputs as they were made, if there is one; half of the time one that communicates."""
    every = range(len(own))
    fixed = [(place, handed[value]) for place, value in enumerate(inputs) if handed.get(value) is not None]
    fitting = [s for s in every if all(own.inputs[place][s] == spec for place, spec in fixed)]
    fitting = fitting or [s for s in every if not any(isinstance(specs[s], Partial) for specs in own.inputs)]
    talking = [s for s in fitting if own.collectives[s]]
    scattered = [s for s in talking if any(o[s] != p[s] for o, p in zip(own.outputs, own.pinned, strict=True))]
    where = draw.random()
    if scattered and where < 0.25:
        return draw.choice(scattered)
    return draw.choice(talking if talking and where < 0.6 else fitting)


# ---- compiled, and run ---------------------------------------------------------------------------------------------


def check(batch: Batch, target: str) -> list[Row]:
    """Compile a batch and compare, case by case."""
    family: Target = parse_target(target, batch.mesh.size).family
    with _uncombined():
        compiled = compile_module(batch.module, parse_target(target, batch.mesh.size))
    rows = [Row(case, c, strategy=s) for case, c, s in zip(batch.cases, batch.counted, batch.strategy, strict=True)]
    said = partition(batch.graph, propagate(batch.graph, batch.annotations, batch.mesh, family), family).collectives
    for each in said:
        if each.bytes * each.count and each.op is not None:
            _add(rows[batch.owner[each.op]].predicted, each.kind, each.axes, each.bytes * each.count)
    module = parse_hlo(compiled.hlo_text)
    of_aten = batch.of_aten
    for found in compiled_collectives(module, batch.mesh, family):
        for aten, size in found.parts or ((found.aten, found.bytes),):
            place = of_aten[aten] if aten in of_aten else _traced(batch, module, found.name)
            _add(rows[place].compiled, found.kind, found.axes, size * found.count)
    return rows


@contextlib.contextmanager
def _uncombined() -> Iterator[None]:
    """Without the passes that combine collectives of several cases (on GPU into one buffer without names)."""
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} --xla_disable_hlo_passes={COMBINERS}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


def _traced(batch: Batch, module: Module, name: str) -> int:
    """The case of a collective without a label: that of the argument that it comes from."""
    computation = module.computations[module.entry]
    todo = [name]
    for each in todo:
        one = computation.instructions.get(each)
        if one is not None and one.opcode == "parameter":
            return batch.owner[batch.graph.arguments[int(one.arguments)]]
        todo.extend(one.operands if one is not None else ())
    raise AssertionError(f"{name} belongs to no case")


def _add(totals: Bytes, kind: str, axes: Sequence[str], size: int) -> None:
    key = f"{kind} {'+'.join(axes)}"
    totals[key] = totals.get(key, 0) + size


def run(batch: Batch, rows: Sequence[Row], timeout: float = 600.0) -> None:
    """Run the batch on virtual CPU devices and on one, and note by how much each case's numbers differ."""
    with tempfile.TemporaryDirectory(prefix="autoshard-rules-") as directory:
        folder = Path(directory)
        (folder / "annotated.mlir").write_bytes(batch.module)
        (folder / "plain.mlir").write_bytes(batch.program.stablehlo)
        request = {
            "devices": batch.mesh.size,
            "fills": [[fill.how, fill.below] for fill in batch.fills],
            "types": [[list(a.type.shape), a.type.dtype] for a in batch.program.arguments],
        }
        (folder / "request.json").write_text(json.dumps(request))
        home = Path(__file__).resolve().parents[2]
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={batch.mesh.size}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(home),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-m", "tests.rules.execute", directory]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode or not (folder / "result.json").exists():
            raise RuntimeError(f"the run failed: {done.stderr.strip()[-2000:]}")
        differences = json.loads((folder / "result.json").read_text())
    for value, difference in zip(batch.graph.outputs, differences, strict=True):
        place = batch.owner[value.op]
        rows[place].numbers = max(rows[place].numbers or 0.0, difference)
        rows[place].tolerance = batch.approximate[place]


def summary(rows: Iterable[Row]) -> Counter[str]:
    """How many rows agree in what."""
    found: Counter[str] = Counter()
    for row in rows:
        found["cases"] += 1
        found["predicted wrongly"] += not row.agrees
        found["counted wrongly"] += not row.counts
        found["wrong numbers"] += not row.equal
    return found
