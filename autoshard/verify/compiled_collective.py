"""One collective as a compiler wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.mesh import AxisGroup


@dataclass(frozen=True)
class CompiledCollective:
    """One collective instruction of a compiled program.

    Attributes:
        kind: XLA's name, without `-start`; `reduce-scatter` also for a TPU reduce-scatter fusion and, on CPU, for an
            all-reduce of which every device goes on with its own slice.
        axes: what of the mesh it runs over.
        bytes: the larger of operand and result payload per device, for one execution; a tuple's summed.
        count: executions per step (trip counts of the loops around it, multiplied).
        dtype: element types as printed, joined by `+`.
        aten: index of the aten op that the compiler says it came from, or None.
        name: the instruction.
        label: its `op_name`.
        parts: of one that combines several values, (aten op that made the value, bytes) for each; none of an
            all-to-all, whose several operands are what one value sends to each device.
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
