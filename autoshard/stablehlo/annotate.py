"""Writes annotations into the captured StableHLO module, in GSPMD's or Shardy's form.

Needs no second trace. `lower/torch_xla/mark_sharding.py` writes the same annotations on a running program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from autoshard.errors import AutoshardError, LoweringError
from autoshard.fused import KINDS
from autoshard.graph.annotations import Annotations, saying, with_regions
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec, format_spec, replicated
from autoshard.program import Program
from autoshard.regions.kernel import Platform
from autoshard.stablehlo.context import bytecode, entries_of, entry_block, functions_of, mlir_context, set_entries
from autoshard.stablehlo.inline import inline_calls
from autoshard.stablehlo.reader import SHARDING_ATTRIBUTES, aten_of, parse_module
from autoshard.stablehlo.regions import Regions, is_region


class AnnotationError(AutoshardError, ValueError):
    """Annotations that the program or the mesh does not admit."""


def gspmd_sharding(spec: Spec, mesh: Mesh) -> str:
    """The `HloSharding` of a spec, as XLA writes it: `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`.

    Device i is device i of the mesh, row-major. Axes of one device are ignored.
    """
    dims = [tuple(axis for axis in axes if mesh.axis_size(axis) > 1) for axes in spec]
    used = [axis for axes in dims for axis in axes]
    if not used:
        return "{replicated}"
    present = list(mesh.split_axes)
    order = used + [axis for axis in present if axis not in used]
    tile = [mesh.ways(axes) for axes in dims]
    copies = mesh.size // mesh.ways(used)
    suffix = ""
    if copies > 1:
        tile.append(copies)
        suffix = " last_tile_dim_replicate"
    if order == present:
        devices = f"[{mesh.size}]"
    else:
        sizes = ",".join(str(mesh.axis_size(axis)) for axis in present)
        permutation = ",".join(str(present.index(axis)) for axis in order)
        devices = f"[{sizes}]T({permutation})"
    return f"{{devices=[{','.join(map(str, tile))}]<={devices}{suffix}}}"


Form = Literal["gspmd", "shardy"]
"""Form of annotations: `custom_call @Sharding` and `mhlo.sharding`, or `sdy.sharding_constraint`,
`sdy.sharding` and the `sdy.mesh` that they name."""

SHARDY_MESH = "mesh"
"""Name of the mesh in a module in Shardy's form."""


def shardy_sharding(spec: Spec, mesh: Mesh) -> str:
    """The `sdy.sharding` of a spec: `#sdy.sharding<@mesh, [{"data"}, {}]>`; every dim is closed."""
    dims = [[axis for axis in axes if mesh.axis_size(axis) > 1] for axes in spec]
    text = ", ".join("{" + ", ".join(f'"{axis}"' for axis in axes) + "}" for axes in dims)
    return f"#sdy.sharding<@{SHARDY_MESH}, [{text}]>"


def check_steps(program: Program) -> None:
    """Refuse to export a step whose next step is another program, or that lacks micro-steps.

    Raises:
        LoweringError: it is one (`Program.once`); it has more than two micro-batches.
    """
    if program.micro_steps is not None and program.micro_steps.count > 2:
        raise LoweringError(
            f"a step of {program.micro_steps.count} micro-batches is captured as two micro-steps and the update, and "
            "runs as a loop of PyTorch alone (plan.annotate(), to_dtensor): export it with micro_batches=2"
        )
    if program.once:
        raise LoweringError(f"the captured step is right once, the next one is another program: {program.once}")


def annotate(
    program: Program,
    graph: Graph,
    annotations: Annotations,
    mesh: Mesh,
    form: Form = "gspmd",
    *,
    text: bool = False,
    partitions: bool = False,
    platform: Platform | None = None,
) -> bytes:
    """The program's module with `annotations` written into it; MLIR bytecode, or its text.

    An argument's pin is its `mhlo.sharding`. Any other pin is a `custom_call @Sharding` right after the op that makes
    the value, read by all its users; a copy is another one after it (and after one per hop), read by the ops of one
    aten op. A result that updates an argument has its sharding. Other markers are removed. In Shardy's form a pin is an
    `sdy.sharding_constraint`.

    Args:
        graph: `build_graph(program)`; annotations refer to its values.
        form: of the annotations.
        text: the module's text, with locations, instead of its bytecode.
        partitions: set the module's number of partitions to the number of devices.
        platform: whose kernels attentions and experts are lowered to; None leaves them as custom calls.

    Raises:
        AnnotationError: a spec does not fit its value or the mesh; a pinned value is neither an argument nor an aten
            output.
    """
    _check(graph, annotations, mesh)
    with mlir_context():
        module = parse_module(program.stablehlo)
        writer = _Writer(program, graph, mesh, module, form)
        writer.write(annotations)
        if platform is not None:
            writer.lower_regions(annotations, platform)
        if partitions:
            writer.count_partitions()
        if not module.operation.verify():
            raise AnnotationError("the annotated module is not valid StableHLO")  # pragma: no cover
        if text:
            return f"{module.operation.get_asm(enable_debug_info=True)}\n".encode()
        return bytecode(module)


def donated(program: Program) -> dict[int, int]:
    """Argument index -> index of the result that takes over its buffer, as for `compile_module`."""
    return {output.updates: index for index, output in enumerate(program.outputs) if output.updates is not None}


def _check(graph: Graph, annotations: Annotations, mesh: Mesh) -> None:
    specs = [(value, spec) for value, spec in annotations.pins.items()]
    specs += [(value, spec) for (value, _), spec in annotations.copies.items()]
    specs += [(value, hop) for (value, _), hops in annotations.hops.items() for hop in hops]
    for value, spec in specs:
        try:
            mesh.check(spec, graph.type_of(value).shape, "")
        except ValueError as error:
            raise AnnotationError(f"{describe(graph, value)}{error}") from None


def describe(graph: Graph, value: Value) -> str:
    """A value in words: `argument 'wte.weight'`, `add, output 0 of aten op 12 (aten.add.Tensor) in h.0`."""
    op = graph.ops[value.op]
    if op.kind == "argument":
        return f"argument {graph.program.arguments[op.attrs['index']].name!r}"
    keys = [key for key, marked in graph.aten_outputs.items() if marked == value]
    if keys:
        index, output = min(keys)
        named = {aten.index: aten for aten in graph.program.ops}
        name = f" ({named[index].name})" if index in named else ""
        where = f" in {named[index].module}" if index in named and named[index].module else ""
        return f"{op.kind}, output {output} of aten op {index}{name}{where}"
    return f"result {value.result} of {op.kind} (op {op.id})"


class _Writer:
    """The state of one `annotate` call; lives inside its MLIR context."""

    def __init__(self, program: Program, graph: Graph, mesh: Mesh, module: Any, form: Form) -> None:
        self.program = program
        self.graph = graph
        self.mesh = mesh
        self.form = form
        self.module = module
        self.function = functions_of(module)["main"]
        self.block = entry_block(self.function)
        # By an op's first result: MLIR's Python objects for one op are not equal, those for one value are.
        self.aten: dict[Any, int | None] = {}

    def write(self, annotations: Annotations) -> None:
        """Inline calls, remove markers, and insert pins and copies."""
        self.inline()
        places = self.take_markers()
        readable = self.readable(places, annotations)
        copies: dict[Value, dict[tuple[Spec, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
        for (value, consumer), spec in annotations.copies.items():
            copies[value][annotations.chain(value, spec)].add(consumer)
        for value in sorted({*annotations.pins, *copies}):
            for made in readable[value]:
                self.annotate_value(made, value, annotations.pins.get(value), copies.get(value, {}))
        self.write_boundary(annotations)

    def inline(self) -> None:
        """Inline calls of private functions, so that each op stands for one value."""

        def note(op: Any, aten: int | None) -> None:
            if len(op.results):
                self.aten[op.results[0]] = aten

        inline_calls(self.module, lambda op, caller: aten_of(op, caller)[0], note)

    def take_markers(self) -> dict[tuple[int, int], Any]:
        """Remove the markers; (aten op, output) -> its marked value, or the last value of an unmarked op.

        In program order, so that a marker of a marker (a view that is its base) finds the op's own result. Also removes
        shardings that torch_xla copied to other ops: a cast gets its operand's, at capture the marker's.
        """
        found = {}
        for view in list(self.block.operations):
            op = view.operation
            for name in SHARDING_ATTRIBUTES:
                if name in op.attributes and op.name != "stablehlo.custom_call":
                    del op.attributes[name]
            if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "Sharding":
                aten, output = aten_of(op, None)
                if aten is not None and output is not None:
                    found[aten, output] = op.operands[0]
                # One without a label is a marker that torch_xla repeated for an in-place update.
                op.results[0].replace_all_uses_with(op.operands[0])
                del self.aten[op.results[0]]
                op.erase()
            elif op.name != "stablehlo.constant" and (aten := self.aten_of(op)) in self.program.unmarked:
                assert aten is not None
                found[aten, 0] = op.results[0]
        return found

    def readable(self, places: Mapping[tuple[int, int], Any], annotations: Annotations) -> dict[Value, list[Any]]:
        """Graph value -> its values in the module (several where the graph merged equal ones)."""
        found: dict[Value, list[Any]] = defaultdict(list)
        for position, op in enumerate(self.graph.arguments):
            found[Value(op)].append(self.block.arguments[position])
        for key, value in self.graph.aten_outputs.items():
            if key in places and places[key] not in found[value]:
                found[value].append(places[key])
        for value in [*annotations.pins, *(value for value, _ in annotations.copies)]:
            if value not in found:
                raise AnnotationError(
                    f"{describe(self.graph, value)} cannot be annotated: it is neither an argument nor the output of "
                    "an aten op"
                )
        return found

    def annotate_value(
        self, made: Any, value: Value, pin: Spec | None, copies: Mapping[tuple[Spec, ...], set[int]]
    ) -> None:
        """Pin one value, and give some of its readers copies with another sharding, through their hops."""
        uses = [(use.owner.operation, use.operand_number) for use in made.uses]
        current = made
        after = made
        if pin is not None and not self.is_argument(made):
            current = after = self.sharding_call(made, after, pin)
            for owner, position in uses:
                owner.operands[position] = current
        written: dict[tuple[Spec, ...], Any] = {(): current}
        for chain, consumers in sorted(copies.items()):
            readers = [(owner, position) for owner, position in uses if self.aten_of(owner) in consumers]
            if not readers:
                named = ", ".join(map(str, sorted(consumers)))
                what = f"{describe(self.graph, value)} is not read by aten op {named}"
                raise AnnotationError(f"{what}: no copy {format_spec(chain[-1])} for it")
            for end in range(1, len(chain) + 1):
                if chain[:end] not in written:
                    after = written[chain[:end]] = self.sharding_call(written[chain[: end - 1]], after, chain[end - 1])
            for owner, position in readers:
                owner.operands[position] = written[chain]

    def aten_of(self, op: Any) -> int | None:
        """The aten op of an op of main, calls inlined; inside a region, that of the loop or branch around it."""
        while (around := op.parent.operation) != self.function.operation:
            op = around
        return self.aten.get(op.results[0]) if len(op.results) else None

    def is_argument(self, value: Any) -> bool:
        from jaxlib.mlir import ir

        return isinstance(value, ir.BlockArgument)

    def sharding_call(self, operand: Any, after: Any, spec: Spec) -> Any:
        """Insert `custom_call @Sharding(operand)` behind the op that makes `after`."""
        from jaxlib.mlir import ir

        if self.is_argument(after):
            where = ir.InsertionPoint.at_block_begin(self.block)
        else:
            where = ir.InsertionPoint.after(after.owner)
        shardy = self.form == "shardy"
        attributes = (
            {"sharding": self.attribute(spec)}
            if shardy
            else {"call_target_name": ir.StringAttr.get("Sharding"), "mhlo.sharding": self.attribute(spec)}
        )
        op = ir.Operation.create(
            "sdy.sharding_constraint" if shardy else "stablehlo.custom_call",
            results=[operand.type],
            operands=[operand],
            attributes=attributes,
            loc=operand.owner.location if not self.is_argument(operand) else ir.Location.unknown(),
            ip=where,
        )
        return op.results[0]

    def write_boundary(self, annotations: Annotations) -> None:
        """Write the shardings of arguments, and of the results that update them."""
        from jaxlib.mlir import ir

        specs = {
            self.graph.ops[value.op].attrs["index"]: spec
            for value, spec in annotations.pins.items()
            if self.graph.ops[value.op].kind == "argument"
        }
        results = {
            index: specs.get(output.updates, replicated(len(output.type.shape)))
            for index, output in enumerate(self.program.outputs)
            if output.updates is not None
        }
        name = "sdy.sharding" if self.form == "shardy" else "mhlo.sharding"

        arguments = {index: self.attribute(spec) for index, spec in specs.items()}
        _write_attributes(self.function, "arg_attrs", name, arguments, len(self.program.arguments))
        updated = {index: self.attribute(spec) for index, spec in results.items()}
        _write_attributes(self.function, "res_attrs", name, updated, len(self.program.outputs))
        if self.form == "shardy":
            axes = ", ".join(
                f'"{axis}"={size}' for axis, size in zip(self.mesh.axis_names, self.mesh.shape, strict=True)
            )
            ir.Operation.create(
                "sdy.mesh",
                attributes={
                    "sym_name": ir.StringAttr.get(SHARDY_MESH),
                    "mesh": ir.Attribute.parse(f"#sdy.mesh<[{axes}]>"),
                },
                loc=ir.Location.unknown(),
                ip=ir.InsertionPoint.at_block_begin(self.module.body),
            )

    def lower_regions(self, annotations: Annotations, platform: Platform) -> None:
        """Replace attentions and experts by regions that are split as their results and operands are annotated."""
        ops = {op.aten: op for op in self.graph.ops if op.kind in KINDS}
        if not ops:
            return
        regions = Regions(self.module, self.mesh, platform, self.attribute, self.form == "shardy")
        calls = [view.operation for view in self.block.operations if is_region(view.operation)]
        for call in calls:  # replacing one erases the ops that take it apart
            op = ops[self.aten_of(call)]
            results = [Value(op.id, number) for number in range(len(op.results))]
            missing = [value for value in results if value not in annotations.pins and self.graph.is_read(value)]
            missing += [value for value in saying(self.graph, op) if annotations.read(value, op) is None]
            if missing:
                raise AnnotationError(
                    f"{describe(self.graph, missing[0])} is not annotated: complete the annotations first"
                )
            replicate = [replicated(len(kind.shape)) for kind in op.results]
            reads = [
                annotations.read(value, op) or replicated(len(self.graph.type_of(value).shape)) for value in op.operands
            ]
            wanted = [annotations.pins.get(value, none) for value, none in zip(results, replicate, strict=True)]
            regions.replace(call, reads, wanted)

    def attribute(self, spec: Spec) -> Any:
        """A spec as an attribute, in this module's form."""
        from jaxlib.mlir import ir

        if self.form == "shardy":
            return ir.Attribute.parse(shardy_sharding(spec, self.mesh))
        return ir.StringAttr.get(gspmd_sharding(spec, self.mesh))

    def count_partitions(self) -> None:
        """Set the module's number of partitions, as jax and other readers of StableHLO expect it."""
        from jaxlib.mlir import ir

        count = ir.IntegerType.get_signless(32)
        self.module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(count, self.mesh.size)
        self.module.operation.attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(count, 1)


def set_boundary(program: Program, arguments: Mapping[int, Spec], mesh: Mesh) -> bytes:
    """Move an annotated trace's argument shardings to `mhlo.sharding`, as torch_xla passes them; MLIR bytecode.

    A placeholder cannot be sharded, so a trace annotates each argument by a `custom_call @Sharding` that all its
    readers read: these are removed. A result that updates an argument has its sharding.
    """
    with mlir_context():
        module = parse_module(program.stablehlo)
        function = functions_of(module)["main"]
        block = entry_block(function)
        texts = {index: gspmd_sharding(spec, mesh) for index, spec in arguments.items()}
        for index in texts:
            argument = block.arguments[index]
            users = [use.owner.operation for use in argument.uses]
            if len(users) == 1 and _is_sharding(users[0]):
                users[0].results[0].replace_all_uses_with(argument)
                users[0].erase()
        updated = {i: o.updates for i, o in enumerate(program.outputs) if o.updates is not None}
        results = {index: texts.get(argument, "{replicated}") for index, argument in updated.items()}
        write_shardings(function, "arg_attrs", texts, len(program.arguments))
        write_shardings(function, "res_attrs", results, len(program.outputs))
        if not module.operation.verify():
            raise AnnotationError("the annotated module is not valid StableHLO")  # pragma: no cover
        return bytecode(module)


def _is_sharding(op: Any) -> bool:
    return bool(op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "Sharding")


def write_shardings(function: Any, name: str, shardings: Mapping[int, str], count: int) -> None:
    """Set `mhlo.sharding` in a function's `arg_attrs` or `res_attrs`, and remove it from entries without one."""
    from jaxlib.mlir import ir

    attributes = {index: ir.StringAttr.get(text) for index, text in shardings.items()}
    _write_attributes(function, name, "mhlo.sharding", attributes, count)


def _write_attributes(function: Any, where: str, name: str, attributes: Mapping[int, Any], count: int) -> None:
    entries = entries_of(function, where, count)
    for index, entry in enumerate(entries):
        for known in SHARDING_ATTRIBUTES:
            entry.pop(known, None)
        if index in attributes:
            entry[name] = attributes[index]
    set_entries(function, where, entries)


def whole(program: Program, graph: Graph) -> bytes:
    """The program's module for one CPU, with attentions and experts kept as one op written out."""
    specs = {
        value: replicated(len(graph.type_of(value).shape)) for op in graph.ops if op.kind in KINDS
        for value in (*op.operands, *(Value(op.id, number) for number in range(len(op.results))))
    }  # fmt: skip
    annotations = with_regions(graph, Annotations(), specs)
    return annotate(program, graph, annotations, Mesh((1,)), platform="cpu") if specs else program.stablehlo
