"""MLIR contexts for StableHLO modules, and traversal of modules, without importing jax itself."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any


def mlir_context() -> Any:
    """An MLIR context with the dialects that programs use."""
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    mhlo.register_mhlo_dialect(context)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    return context


def functions_of(module: Any) -> dict[str, Any]:
    """Name -> function of a module."""
    found = {}
    for view in module.body.operations:
        if view.operation.name == "func.func":
            found[view.operation.attributes["sym_name"].value] = view.operation
    return found


def entry_block(function: Any) -> Any:
    """The single block of a function."""
    return function.regions[0].blocks[0]


def bytecode(module: Any) -> bytes:
    """A module as MLIR bytecode."""
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


def ops_inside(op: Any) -> Iterator[Any]:
    """Every op in the regions of an op, recursively, in pre-order."""
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from ops_inside(view.operation)


def entries_of(function: Any, where: str, count: int) -> list[dict[str, Any]]:
    """A function's `arg_attrs` or `res_attrs`, a dictionary for each argument or result."""
    from jaxlib.mlir import ir

    if where not in function.attributes:
        return [{} for _ in range(count)]
    return [{item.name: item.attr for item in ir.DictAttr(entry)} for entry in ir.ArrayAttr(function.attributes[where])]


def set_entries(function: Any, where: str, entries: list[dict[str, Any]]) -> None:
    """Write back the result of `entries_of`."""
    from jaxlib.mlir import ir

    function.attributes[where] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
