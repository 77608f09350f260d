"""A collective instruction of a compiled program."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.mesh import AxisGroup


@dataclass(frozen=True)
class CompiledCollective:
    """One collective instruction of a compiled program.

    Attributes:
        kind: XLA's name, without `-start`; `reduce-scatter` also for a TPU reduce-scatter fusion and, on CPU, for an
            all-reduce of which every device uses only its own slice.
        axes: the mesh axes that it spans.
        bytes: the larger of operand and result payload per device, for one execution; a tuple's summed.
        count: executions per step (the product of the enclosing loops' trip counts).
        dtype: element types as printed, joined by `+`.
        aten: index of the aten op in its metadata, or None.
        name: the instruction.
        label: its `op_name`.
        parts: of a combined collective, (aten op that made the value, bytes) per value; empty for an all-to-all, whose
            operands are the parts of one value.
    """

    kind: str
    axes: AxisGroup
    bytes: int
    count: int = 1
    dtype: str = ""
    aten: int | None = None
    name: str = ""
    label: str = ""
    parts: tuple[tuple[int | None, int], ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes per device and step."""
        return self.bytes * self.count
