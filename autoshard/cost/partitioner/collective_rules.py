"""Which collectives a target's compiler turns into others; `targets.py` has the rules of each family."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.mesh import AxisGroup, Mesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scattered:
    """A reduce-scatter.

    Attributes:
        padded: elements it reduces, padding included, as a multiple of the array's.
        moved: elements that collective permutes bring into place afterwards, as a multiple of the array's.
    """

    padded: float = 1.0
    moved: float = 0.0


class CollectiveRules:
    """The rules of a compiler that leaves every collective as it is; subclasses override."""

    def lies_row_major(self, kind: str, shape: Shape) -> bool:
        """Whether the result of an op of this StableHLO kind has a row-major layout, padded or not."""
        return True

    def sums_whole(self, axes: AxisGroup, mesh: Mesh) -> bool:
        """Whether a sum over `axes` stays an all-reduce in every case."""
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
        """The reduce-scatter of an array of `shape` over `axes`, of which each device keeps a slice along `dim`.

        Args:
            row_major: whether the producer's layout is row-major (`lies_row_major`).
            summed: whether reductions read the slices.
            packed: elements per 32-bit word (2 of bf16).

        Returns:
            None where it stays an all-reduce with a dynamic-slice.
        """
        return Scattered()

    def hides(self, flops: int, size: int, axes: AxisGroup, mesh: Mesh) -> bool:
        """Whether a contraction of `flops` FLOP hides the permutes of a windowed einsum of `size` bytes."""
        return False

    def gathers_as_sum(self, shape: Shape, part: int, size: int, axes: AxisGroup, mesh: Mesh) -> bool:
        """Whether an all-gather over `axes` becomes an all-reduce.

        Args:
            shape: of the gathered array.
            part: elements of one device's shard.
            size: bytes of the result.
        """
        return False
