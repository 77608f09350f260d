"""The shardings that plans let one tensor have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autoshard.mesh import Mesh, Spec, orders, replicated

MAX_PADDING = 1.02
"""Largest padding of an uneven split, as a factor (a vocabulary of 50257); merged dims are only split evenly."""


@dataclass(frozen=True)
class Orders:
    """The orders in which axes may split one dim, major to minor: `mesh.orders`, and those of hints.

    Attributes:
        asked: the specs of hints.
    """

    mesh: Mesh
    asked: tuple[Spec, ...] = ()

    def __call__(self, axes: Sequence[str]) -> Iterable[tuple[str, ...]]:
        """The orders of `axes`."""
        asked = (tuple(axis for axis in dim if axis in axes) for spec in self.asked for dim in spec)
        also = [each for each in asked if len(each) == len(axes)]
        return dict.fromkeys((*orders(axes, self.mesh.split_axes), *also))


def fits(size: int, ways: int, *, even: bool = False) -> bool:
    """Whether a dim of `size` is worth splitting into so many tiles."""
    if size % ways == 0:
        return True
    return not even and -(-size // ways) * ways <= MAX_PADDING * size


def argument_specs(
    shape: Sequence[int],
    mesh: Mesh,
    *,
    even: bool = False,
    allowed: Callable[[Sequence[str]], Iterable[tuple[str, ...]]] = itertools.permutations,
) -> tuple[Spec, ...]:
    """Every sharding of an argument: each axis on one dim or none, as far as `allowed` where several share one.

    `even`: only where it divides. Compilers abort on indices that need padding (all targets).
    """
    axes = mesh.split_axes
    found: list[Spec] = []
    for chosen in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for axis, dim in zip(axes, chosen, strict=True):
            if dim is not None:
                dims[dim] += (axis,)
        if all(fits(shape[d], mesh.ways(split), even=even) for d, split in enumerate(dims) if split):
            found.extend(itertools.product(*map(allowed, dims)))
    return tuple(found) or (replicated(len(shape)),)
