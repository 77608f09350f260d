"""What a target's compiler makes of the collectives of its partitioner: `targets.py` finds the rules of each family."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.mesh import AxisGroup, Mesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scattered:
    """A reduce-scatter.

    Attributes:
        padded: elements that it sums, over those of the array.
        moved: elements that permutes bring into place afterwards, over those of the array.
    """

    padded: float = 1.0
    moved: float = 0.0


class CollectiveRules:
    """Every collective stays what it is; subclasses say which do not."""

    def lies_row_major(self, kind: str, shape: Shape) -> bool:
        """Whether what an op of this StableHLO kind makes lies row-major, whatever is padded."""
        return True

    def sums_whole(self, axes: AxisGroup, mesh: Mesh) -> bool:
        """Whether no sum over `axes` is a reduce-scatter."""
        return False

    def scattered(
        self,
        shape: Shape,
        dim: int,
        axes: AxisGroup,
        mesh: Mesh,
        *,
        row_major: bool = False,
        summed: bool = False,
        packed: int = 1,
    ) -> Scattered | None:
        """How a sum over `axes` of arrays of `shape`, of which each device keeps a slice along `dim`, is scattered.

        Args:
            row_major: whether the array's maker lays it out so (`lies_row_major`).
            summed: whether sums read the slices.
            packed: numbers that take one place of 32 bits.

        Returns:
            None where it stays an all-reduce.
        """
        return Scattered()

    def hides(self, flops: int, size: int, axes: AxisGroup, mesh: Mesh) -> bool:
        """Whether a contraction of so many FLOPs hides the permutes of a windowed einsum of `size` bytes."""
        return False

    def gathers_as_sum(self, shape: Shape, part: int, size: int, axes: AxisGroup, mesh: Mesh) -> bool:
        """Whether an all-gather over `axes` is an all-reduce.

        Args:
            shape: of the whole array.
            part: elements that each device has before.
            size: bytes of the result.
        """
        return False
