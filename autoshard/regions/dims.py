"""The dims of the operands and results of an op that is a manual region, by letter, and which devices may share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Shape = Sequence[int]
Axis = TypeVar("Axis")


@dataclass(frozen=True)
class RegionDims:
    """Letters per dim; a space for a dim of size 1 that is broadcast.

    Attributes:
        operands, results: one text per tensor.
        sizes: of the dims.
        shared: the letters that devices may share, none of them unevenly.
        operands_say: places of the operands whose shardings say how it is split; none: that of the first result does.
        extras: the letter by which the kernel's own constants are split.
        scatters: letters along which partial sums may be scattered; each is one way.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    sizes: Mapping[str, int] = field(compare=False)
    shared: str
    operands_say: tuple[int, ...] = ()
    extras: str = ""
    scatters: tuple[str, ...] = ()

    def summed(self, result: int) -> str:
        """The shared dims over which this result is a partial sum."""
        return "".join(letter for letter in self.shared if letter not in self.results[result])

    def split(
        self, reads: Sequence[Sequence[tuple[Axis, ...]]], wanted: Sequence[Sequence[tuple[Axis, ...]]],
        ways: Callable[[tuple[Axis, ...]], int],
    ) -> dict[str, tuple[Axis, ...]]:  # fmt: skip
        """Shared letter -> the axes that split it, where operands are read as `reads` and results are `wanted`."""
        say = [(self.operands[place], reads[place]) for place in self.operands_say]
        found: dict[str, tuple[Axis, ...]] = {}
        used: set[Axis] = set()
        for letters, tiling in say or [(self.results[0], wanted[0])]:
            for letter, axes in zip(letters, tiling, strict=True):
                fits = letter in self.shared and self.sizes[letter] % ways(axes) == 0
                if fits and letter not in found and used.isdisjoint(axes):
                    found[letter] = axes
                    used.update(axes)
        return found

    @staticmethod
    def tiling(letters: str, split: Mapping[str, tuple[Axis, ...]]) -> tuple[tuple[Axis, ...], ...]:
        """How a tensor with these dims is split."""
        return tuple(split.get(letter, ()) for letter in letters)

    def made(
        self, result: int, split: Mapping[str, tuple[Axis, ...]], wanted: Sequence[tuple[Axis, ...]]
    ) -> tuple[tuple[tuple[Axis, ...], ...], tuple[Axis, ...], int | None]:
        """A result's tiling once summed, the axes it is summed over, and the dim along which that sum is scattered.

        It is where `wanted` is split by these axes too, along one dim; else all-reduced.
        """
        tiling = self.tiling(self.results[result], split)
        axes = tuple(axis for letter in self.summed(result) for axis in split.get(letter, ()))
        for dim in range(len(tiling)) if axes else ():
            along = (*tiling[:dim], (*tiling[dim], *axes), *tiling[dim + 1 :])
            if along == tuple(wanted):
                return along, axes, dim
        return tiling, axes, None

    def scattered(
        self, way: str, split: Mapping[str, tuple[Axis, ...]], ways: Callable[[tuple[Axis, ...]], int]
    ) -> list[tuple[tuple[Axis, ...], ...]] | None:
        """The results' tilings where sums are scattered along the letters of `way`; None if none is, or not evenly."""
        found, any_is = [], False
        for number, letters in enumerate(self.results):
            tiling, axes, _ = self.made(number, split, ())
            along = next((letters.index(letter) for letter in way if letter in letters), None)
            if axes and along is not None:
                if self.sizes[letters[along]] % ways((*tiling[along], *axes)):
                    return None
                tiling = (*tiling[:along], (*tiling[along], *axes), *tiling[along + 1 :])
                any_is = True
            found.append(tiling)
        return found if any_is else None


def sizes_of(kind: str, operands: Sequence[str], shapes: Sequence[Shape], spread: Sequence[int] = ()) -> dict[str, int]:
    """Letter -> size.

    Args:
        spread: places of operands that may have size 1 instead.

    Raises:
        ValueError: the shapes are not of such operands.
    """
    found: dict[str, int] = {}
    if len(operands) != len(shapes):
        raise ValueError(f"an {kind} with {len(shapes)} operands: {len(operands)} are needed")
    for place, (letters, shape) in enumerate(zip(operands, shapes, strict=True)):
        if len(letters) != len(shape) or any(
            found.setdefault(letter, size) != size
            for letter, size in zip(letters, shape, strict=True)
            if not (place in spread and size == 1)
        ):
            package = kind.split("_")[0]
            raise ValueError(f"operand {place} of an {kind} has shape {tuple(shape)}: see autoshard/{package}/form.py")
    return found
