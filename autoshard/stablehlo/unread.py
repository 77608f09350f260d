"""Arguments that a program overwrites without reading: a buffer that is filled, the loss that a module keeps.

A lowered trace has no parameter for these. They are arguments all the same: they exist before the step, sharded like
their replacement.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.program import TensorType
from autoshard.stablehlo.context import bytecode, entries_of, entry_block, functions_of, mlir_context, set_entries
from autoshard.stablehlo.reader import parse_module


def with_arguments(stablehlo: bytes, types: Sequence[TensorType]) -> bytes:
    """Append unused parameters to a module's main function; MLIR bytecode."""
    if not types:
        return stablehlo
    from jaxlib.mlir import ir

    with mlir_context():
        module = parse_module(stablehlo)
        main = functions_of(module)["main"]
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        added = [ir.Type.parse(f"tensor<{''.join(f'{n}x' for n in each.shape)}{each.dtype}>") for each in types]
        whole = ir.FunctionType.get([*kind.inputs, *added], kind.results)
        main.attributes["function_type"] = ir.TypeAttr.get(whole)
        set_entries(main, "arg_attrs", entries_of(main, "arg_attrs", len(kind.inputs)) + [{} for _ in added])
        for each in added:
            entry_block(main).add_argument(each, main.location)
        return bytecode(module)
