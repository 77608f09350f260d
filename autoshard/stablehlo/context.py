"""The MLIR context in which StableHLO modules are read; light, for a process that does nothing else."""

from __future__ import annotations

from typing import Any


def mlir_context() -> Any:
    """An MLIR context with the dialects that programs use; costs no import of jax itself."""
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
