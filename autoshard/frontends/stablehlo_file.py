"""Reads any StableHLO file as a `Program`: from jax.export, `jax.jit(f).lower(...)`, torch_xla, or by hand.

The ops of main, calls inlined, stand for aten ops: op k is the k-th, and each of its floating-point results that
depends on an argument can be annotated. The file's information on arguments is used:

- names: from locations (jax writes `params['w']`, which becomes `params.w`); else `arg0`, `arg1`…
- ties between steps: `tf.aliasing_output` (input-output aliases), and for `jax.buffer_donor` the result of the same
  name and type.
- roles: a donated argument read by the update only is optimizer state, any other a parameter; one without dims is a
  scalar; the rest are inputs. The `.meta` file of torch_xla's `save_as_stablehlo` names the parameters.
- phases: jax's names mark forward (`jvp(...)`) and backward (`transpose(...)`); in such a program, ops that lead to
  donated results only are the optimizer.

Shardings in the file are ignored: they are what is to be planned.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autoshard import json_text
from autoshard.dtypes import is_float
from autoshard.errors import SourceError
from autoshard.program import Argument, ArgumentRole, AtenOp, Output, OutputRole, Program, TensorType
from autoshard.stablehlo.attributes import SPLIT_BY_HAND
from autoshard.stablehlo.context import (
    bytecode,
    entries_of,
    entry_block,
    functions_of,
    mlir_context,
    ops_inside,
    set_entries,
)
from autoshard.stablehlo.inline import check_calls, inline_calls
from autoshard.stablehlo.reader import SHARDING_ATTRIBUTES
from autoshard.stablehlo.untrusted import BYTECODE, PORTABLE, refuse

FRONTEND = "stablehlo"
_UNNAMED = frozenset({"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation"})
"""Scopes that jax's transformations add to names."""
MOST_ELEMENTS = 2**58
"""Most elements of one tensor, so that its bytes fit in 64 bits."""
_ANNOTATION_OPS = frozenset({"sdy.sharding_constraint"})


def read_program(path: str | os.PathLike[str]) -> Program:
    """Read a StableHLO module: text, bytecode, a portable artifact, or a serialized `jax.export.Exported`.

    Args:
        path: a file, or a directory of torch_xla's `save_as_stablehlo`.

    Raises:
        SourceError: it cannot be read, is no StableHLO, has no main function, or has data-dependent shapes.
    """
    where, meta = _located(Path(path))
    try:
        content = where.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read {where}: {error.strerror}") from None
    with mlir_context():
        module = _parse(content, where)
        return _Reader(module, where, meta).program()


def _located(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """The module's file, and the content of torch_xla's `.meta` file beside it."""
    if path.is_dir():
        found = sorted((path / "functions").glob("*.bytecode")) or sorted((path / "functions").glob("*.mlir"))
        if len(found) != 1:
            what = f"{len(found)} functions" if found else "no function"
            raise SourceError(f"{path} holds {what} of StableHLO; name the file in {path / 'functions'} to plan")
        path = found[0]
    beside = path.with_suffix(".meta")
    if beside != path and beside.is_file():
        try:
            meta = json_text.parse(beside.read_bytes())
        except (OSError, ValueError):
            meta = None
        known = meta.get("input_locations", []) if isinstance(meta, Mapping) else None
        if not isinstance(known, list) or not all(isinstance(entry, Mapping) for entry in known):
            raise SourceError(f"{beside} is not the JSON that torch_xla writes beside a StableHLO function")
        return path, meta
    return path, {}


def _parse(content: bytes, where: Path) -> Any:
    """The module in a file, in the current context."""
    from jaxlib.mlir import ir

    if not content.startswith(BYTECODE) and b"\0" in content[:4096]:
        exported = _exported(content)
        if exported is None:
            raise SourceError(f"{where} is neither an MLIR module nor what jax.export serialized")
        content = exported
    portable = content.startswith(PORTABLE)
    try:
        refuse(content)
        return _portable(content) if portable else ir.Module.parse(content)
    except (ir.MLIRError, ValueError) as error:
        said = [line.strip() for line in str(error).splitlines()] or [""]
        said = [line for line in said if "error" in line] or said
    if portable:
        raise SourceError(
            f"{where} is a StableHLO artifact that this jaxlib cannot read ({said[0]}); it may have been written by a "
            "newer version"
        )
    raise SourceError(f"{where} is no StableHLO module: {said[0]}")


def _portable(content: bytes) -> Any:
    from jaxlib._jax import mlir

    return mlir.deserialize_portable_artifact(content)


def _exported(content: bytes) -> bytes | None:
    """The module inside `jax.export.Exported.serialize()`, or None."""
    from jax import export

    try:
        import flatbuffers  # noqa: F401
    except ImportError:
        raise SourceError("what jax.export serialized needs flatbuffers: pip install 'autoshard[jax]'") from None
    try:
        return bytes(export.deserialize(bytearray(content)).mlir_module_serialized)
    except Exception:  # a flatbuffer reader may raise anything on other bytes
        return None


@dataclass
class _Op:
    """One op of main after inlining."""

    op: Any
    reads: tuple[Any, ...]
    constant: bool
    name: str


class _Reader:
    """A parsed module being labelled; lives inside its MLIR context."""

    def __init__(self, module: Any, where: Path, meta: Mapping[str, Any]) -> None:
        self.module = module
        self.where = where
        self.meta = meta
        functions = functions_of(module)
        if "main" not in functions:
            known = ", ".join(functions) or "none"
            raise SourceError(f"{where} has no function main, only {known}; the function to plan is to be called main")
        try:
            check_calls(functions)
        except ValueError as error:
            raise SourceError(f"{where} cannot be planned: {error}") from None
        self.main = functions["main"]
        self.block = entry_block(self.main)

    def program(self) -> Program:
        """Label every op, mark annotatable values, and build the program."""
        types = [self.type_of(value.type, f"argument {i}") for i, value in enumerate(self.block.arguments)]
        inline_calls(self.module, lambda op, caller: None, lambda op, context: None)
        self.remove_shardings()
        ops = self.ops()
        results = list(list(self.block.operations)[-1].operation.operands)
        names = self.argument_names()
        result_types = [self.type_of(value.type, f"result {i}") for i, value in enumerate(results)]
        result_names = self.result_names(len(results))
        ties = self.ties(names, types, result_names, result_types)
        phases = self.phases(ops, results, ties)
        roles = self.roles(names, types, ops, phases, ties)
        arguments = tuple(
            Argument(name, role, type_, _parameter_of(i, names, types, roles) if role == "optimizer_state" else None)
            for i, (name, role, type_) in enumerate(zip(names, roles, types, strict=True))
        )
        outputs = self.outputs(arguments, result_names, result_types, ties)
        described = self.label(ops, names, phases)
        if not self.module.operation.verify():
            raise SourceError(f"{self.where} is not valid StableHLO after its calls were inlined")  # pragma: no cover
        return Program(
            kind="train" if ties else "forward",
            frontend=FRONTEND,
            versions={"jaxlib": version("jaxlib")},
            switches=(),
            stablehlo=bytecode(self.module),
            arguments=arguments,
            outputs=outputs,
            ops=described,
        )

    # The module.

    def type_of(self, mlir_type: Any, what: str) -> TensorType:
        from jaxlib.mlir import ir

        if not isinstance(mlir_type, ir.RankedTensorType):
            raise SourceError(f"{self.where}: {what} of main has the type {mlir_type}; only tensors can be planned")
        if not mlir_type.has_static_shape:
            raise SourceError(
                f"{self.where}: {what} of main has the type {mlir_type}; shapes have to be known: export the function "
                "for the shapes that it will run with"
            )
        found = TensorType(tuple(mlir_type.shape), str(mlir_type.element_type))
        if math.prod(found.shape) > MOST_ELEMENTS:
            raise SourceError(
                f"{self.where}: {what} of main has the type {mlir_type}: more elements than XLA can count"
            )
        return found

    def remove_shardings(self) -> None:
        """Remove sharding annotations and the number of partitions.

        Raises:
            SourceError: parts of it are per-device code (jax's `shard_map`).
        """

        if any(op.name == "sdy.manual_computation" for op in ops_inside(self.module.operation)):
            raise SourceError(f"{self.where}: {SPLIT_BY_HAND}")
        for view in list(self.block.operations):
            op = view.operation
            sharding = op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "Sharding"
            if op.name in _ANNOTATION_OPS or sharding:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
                continue
            for name in SHARDING_ATTRIBUTES:
                if name in op.attributes:
                    del op.attributes[name]
        for name in ("arg_attrs", "res_attrs"):
            if name in self.main.attributes:
                entries = entries_of(self.main, name, 0)
                kept = [{key: entry[key] for key in entry.keys() - SHARDING_ATTRIBUTES} for entry in entries]
                set_entries(self.main, name, kept)
        for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
            if name in self.module.operation.attributes:
                del self.module.operation.attributes[name]
        for view in list(self.module.body.operations):
            if view.operation.name == "sdy.mesh":
                view.operation.erase()

    def ops(self) -> list[_Op]:
        """The ops of main, without its return."""
        constants: set[Any] = set()
        found = []
        for view in list(self.block.operations)[:-1]:
            op = view.operation
            reads = tuple(op.operands) + tuple(_captured(op))
            constant = all(value in constants for value in reads)
            if constant:
                constants.update(op.results)
            found.append(_Op(op, reads, constant, getattr(op.location, "name_str", "")))
        return found

    def label(self, ops: Sequence[_Op], names: Sequence[str], phases: Sequence[str]) -> tuple[AtenOp, ...]:
        """Give op k the location `op<k>`, and each of its annotatable results a marker."""
        from jaxlib.mlir import ir

        makers: dict[Any, tuple[int, int] | str | None] = dict(zip(self.block.arguments, names, strict=True))
        described = []
        for k, (each, phase) in enumerate(zip(ops, phases, strict=True)):
            op = each.op
            producers = tuple(makers.get(value) for value in each.reads)
            kinds = tuple(self.kind_of(result.type) for result in op.results)
            described.append(AtenOp(k, op.name, module_path(each.name), phase, kinds, producers, _options(op)))
            for j, result in enumerate(op.results):
                makers[result] = None if each.constant else (k, j)
            op.location = ir.Location.name(f"op{k}/{each.name}" if each.name else f"op{k}")
            if each.constant:
                continue
            where = ir.InsertionPoint.after(op)
            for j, (result, kind) in enumerate(zip(list(op.results), kinds, strict=True)):
                if not is_float(kind.dtype):
                    continue
                uses = [(use.owner.operation, use.operand_number) for use in result.uses]
                marker = ir.Operation.create(
                    "stablehlo.custom_call",
                    results=[result.type],
                    operands=[result],
                    attributes={"call_target_name": ir.StringAttr.get("Sharding")},
                    loc=ir.Location.name(f"op{k}.out{j}"),
                    ip=where,
                )
                for owner, position in uses:
                    owner.operands[position] = marker.results[0]
        return tuple(described)

    def kind_of(self, mlir_type: Any) -> TensorType:
        from jaxlib.mlir import ir

        if isinstance(mlir_type, ir.RankedTensorType):
            return self.type_of(mlir_type, "a value")
        return TensorType((), str(mlir_type))

    # The file's information on arguments and results.

    def argument_names(self) -> list[str]:
        arguments = list(self.block.arguments)
        known = [_meta_name(entry) for entry in self.meta.get("input_locations", ())]
        if len(known) != len(arguments):
            known = [path_name(getattr(value.location, "name_str", "")) for value in arguments]
        return _distinct([name or f"arg{i}" for i, name in enumerate(known)])

    def result_names(self, count: int) -> list[str]:
        infos = [entry.get("jax.result_info") for entry in entries_of(self.main, "res_attrs", count)]
        return [path_name(info.value) if info is not None else "" for info in infos]

    def ties(
        self,
        names: Sequence[str],
        types: Sequence[TensorType],
        result_names: Sequence[str],
        result_types: Sequence[TensorType],
    ) -> dict[int, int]:
        """Result -> the argument that it replaces."""
        ties: dict[int, int] = {}
        donors = []
        for index, entry in enumerate(entries_of(self.main, "arg_attrs", len(names))):
            if "tf.aliasing_output" in entry:
                result = entry["tf.aliasing_output"].value
                if result >= len(result_types) or types[index] != result_types[result] or result in ties:
                    raise SourceError(
                        f"{self.where}: argument {index} ({names[index]}) says that result {result} takes its buffer, "
                        "but that is none of its type, or another's"
                    )
                ties[result] = index
            elif "jax.buffer_donor" in entry:
                donors.append(index)
        for index in donors:
            tail = names[index].partition(".")[2] or names[index]
            matching = [
                result
                for result, name in enumerate(result_names)
                if result not in ties and types[index] == result_types[result] and f".{name}".endswith(f".{tail}")
            ]
            if len(matching) == 1:
                ties[matching[0]] = index
        return ties

    def phases(self, ops: Sequence[_Op], results: Sequence[Any], ties: Mapping[int, int]) -> list[str]:
        """Phase of each op; without jax's names everything is forward."""
        differentiated = any("jvp(" in each.name for each in ops)
        leads_on = {value for i, value in enumerate(results) if i not in ties}
        phases = []
        for each in reversed(ops):
            if "transpose(" in each.name:
                phase = "backward"
            elif not differentiated or "jvp(" in each.name or any(value in leads_on for value in each.op.results):
                phase = "forward"
            else:
                phase = "optimizer"
            if phase != "optimizer":
                leads_on.update(each.reads)
            phases.append(phase)
        return phases[::-1]

    def roles(
        self,
        names: Sequence[str],
        types: Sequence[TensorType],
        ops: Sequence[_Op],
        phases: Sequence[str],
        ties: Mapping[int, int],
    ) -> list[ArgumentRole]:
        known = [entry.get("type_") for entry in self.meta.get("input_locations", ())]
        tied = set(ties.values())
        updating = "optimizer" in phases
        read_before = {
            value for each, phase in zip(ops, phases, strict=True) if phase != "optimizer" for value in each.reads
        }
        roles: list[ArgumentRole] = []
        for index, (value, kind) in enumerate(zip(self.block.arguments, types, strict=True)):
            if not kind.shape:
                roles.append("scalar")
            elif len(known) == len(types) and known[index] in ("parameter", "constant"):
                roles.append("parameter" if known[index] == "parameter" else "buffer")
            elif index in tied:
                roles.append("optimizer_state" if updating and value not in read_before else "parameter")
            else:
                roles.append("input")
        return roles

    def outputs(
        self,
        arguments: Sequence[Argument],
        names: Sequence[str],
        types: Sequence[TensorType],
        ties: Mapping[int, int],
    ) -> tuple[Output, ...]:
        made: list[Output] = []
        for index, (name, kind) in enumerate(zip(names, types, strict=True)):
            if index in ties:
                argument = arguments[ties[index]]
                role: OutputRole = "output"
                if argument.role == "parameter" or argument.role == "buffer" or argument.role == "optimizer_state":
                    role = argument.role
                made.append(Output(argument.name, role, kind, ties[index]))
            else:
                made.append(Output(name or f"result{index}", "output", kind))
        free = [each for each in made if each.updates is None]
        losses = [each for each in free if not each.type.shape and is_float(each.type.dtype)]
        if ties and len(losses) == 1:
            made[made.index(losses[0])] = Output(losses[0].name, "loss", losses[0].type)
        return tuple(made)


_UNTOLD = frozenset({"value", *SHARDING_ATTRIBUTES})
"""Attributes that do not identify an op: a constant's elements, and shardings."""
_LONGEST = 80
"""Most characters of an attribute before it is hashed."""


def _options(op: Any) -> str:
    """An op's attributes, and the ops of its regions, as `AtenOp.options`."""
    said = sorted((item, str(op.attributes[item])) for item in op.attributes if item not in _UNTOLD)
    inside = [view.operation.name for region in op.regions for block in region.blocks for view in block.operations]
    said += [("body", " ".join(inside))] if inside else []
    return ", ".join(f"{name}={_short(text)}" for name, text in said)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _captured(op: Any) -> Iterator[Any]:
    """Free values of the regions of an op."""
    inside: set[Any] = set()

    def walk(one: Any) -> Iterator[Any]:
        for region in one.regions:
            for block in region.blocks:
                inside.update(block.arguments)
                for view in block.operations:
                    inner = view.operation
                    for operand in inner.operands:
                        if operand not in inside:
                            yield operand
                    yield from walk(inner)
                    inside.update(inner.results)

    yield from walk(op)


def path_name(path: str) -> str:
    """A pytree path as a name: `params['h'][0].kernel` -> `params.h.0.kernel`."""
    parts = re.findall(r"\[([^\[\]]*)\]|([^.\[\]]+)", path)
    return ".".join((bracket or plain).strip("'\"") for bracket, plain in parts)


def module_path(name: str) -> str:
    """The scopes in an op's location: `jit(step)/transpose(jvp(GPT))/h0/dot_general` -> `GPT/h0`."""
    scopes = []
    for part in name.split("/")[:-1]:
        while (wrapped := re.fullmatch(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)", part)) is not None:
            part = wrapped[1]
        if part and part not in _UNNAMED and not re.match(r"p?jit\(", part):
            scopes.append(part)
    return ".".join(scopes)


def _meta_name(entry: Any) -> str:
    """The name in a `.meta` file: a parameter's own, an input's position."""
    if not isinstance(entry, Mapping):
        return ""
    return str(entry.get("name") or (f"input{entry['position']}" if entry.get("type_") == "input_arg" else ""))


def _distinct(names: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    found = []
    for name in names:
        while name in taken:
            name += "_"
        taken.add(name)
        found.append(name)
    return found


def _parameter_of(
    index: int, names: Sequence[str], types: Sequence[TensorType], roles: Sequence[ArgumentRole]
) -> str | None:
    """The parameter of an optimizer state: of its shape, with the longest common end of names."""
    mine = names[index].split(".")

    def common(other: str) -> int:
        parts = other.split(".")
        pairs = zip(mine[::-1], parts[::-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(parts)))

    candidates = [i for i, role in enumerate(roles) if role == "parameter" and types[i].shape == types[index].shape]
    best = max(candidates, key=lambda i: common(names[i]), default=None)
    return names[best] if best is not None and common(names[best]) else None
