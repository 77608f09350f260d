"""Warm starts: a plan carried over to a mesh of which one axis is split in two, with the same shardings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from autoshard.mesh import Mesh
from autoshard.strategies.formulate import Formulation
from autoshard.strategies.space import Assignment, Partial, Sharded, Specs, Strategies

Axes = Mapping[str, tuple[str, ...]]
"""Axis of the coarser mesh -> the axes into which it is split, major to minor."""


@dataclass(frozen=True)
class Carried:
    """A choice of strategies on a mesh, without its problem: shardings per argument, group and copy.

    Attributes:
        arguments: shardings.
        groups: assignments of axes to factors, and shardings at the boundary (strategies of one assignment differ in
            where sums are all-reduced).
        copies: (sharding that users see, whether it is the value itself).
        prices: of the problem (`Formulation.prices`).
    """

    mesh: Mesh
    arguments: tuple[Sharded, ...]
    groups: tuple[tuple[Assignment, tuple[Sharded, ...]], ...]
    copies: tuple[tuple[Sharded, bool], ...]
    prices: tuple[float, float] = (1.0, 1.0)


def carried_from(formulation: Formulation, mesh: Mesh, choice: Sequence[int]) -> Carried:
    """The shardings of a choice of one strategy per node."""
    first = len(formulation.argument_values)
    copies = choice[first + len(formulation.strategies) :]
    return Carried(
        mesh,
        tuple(specs[choice[node]] for node, specs in enumerate(formulation.argument_specs)),
        tuple(
            (ways.assignments[choice[first + group]], _ends(ways, choice[first + group]))
            for group, ways in enumerate(formulation.strategies)
        ),
        tuple(
            (copy.specs[number], bool(copy.same[number]))
            for copy, number in zip(formulation.copies, copies, strict=False)
        ),
        formulation.prices,
    )


def choices_from(carried: Carried, formulation: Formulation, mesh: Mesh) -> Iterator[list[int]]:
    """The choices on `mesh` with the shardings of `carried`: one per way to split the coarser axes into its axes."""
    for axes in cuts(carried.mesh, mesh):
        found = _choice(carried, formulation, axes)
        if found is not None:
            yield found


def cuts(coarse: Mesh, fine: Mesh) -> Iterator[Axes]:
    """The ways to group neighbouring axes of `fine` into the axes of `coarse`."""
    if coarse.device != fine.device or len(coarse.shape) >= len(fine.shape):
        return
    for inner in combinations(range(1, len(fine.shape)), len(coarse.shape) - 1):
        ends = (0, *inner, len(fine.shape))
        parts = [range(start, end) for start, end in pairwise(ends)]
        if all(size == _product(fine.shape[i] for i in part) for size, part in zip(coarse.shape, parts, strict=True)):
            names = [tuple(fine.axis_names[i] for i in part) for part in parts]
            yield dict(zip(coarse.axis_names, names, strict=True))


def _product(sizes: Iterator[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _ends(ways: Strategies, number: int) -> tuple[Sharded, ...]:
    """Shardings of a strategy's inputs, outputs, and outputs as annotated."""
    return tuple(specs[number] for specs in (*ways.inputs, *ways.outputs, *ways.pinned))


def _choice(carried: Carried, formulation: Formulation, axes: Axes) -> list[int] | None:
    def cut(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(part for name in names for part in axes[name])

    def spec(sharded: Sharded) -> Sharded:
        if isinstance(sharded, Partial):
            return replace(sharded, spec=tuple(map(cut, sharded.spec)), axes=cut(sharded.axes))
        return tuple(map(cut, sharded))

    choice: list[int | None] = [
        _place(specs, spec(wanted)) for specs, wanted in zip(formulation.argument_specs, carried.arguments, strict=True)
    ]
    for ways, (assignment, ends) in zip(formulation.strategies, carried.groups, strict=True):
        choice.append(_nearest(ways, tuple(map(cut, assignment)), tuple(map(spec, ends))))
    for copy, (handed, same) in zip(formulation.copies, carried.copies, strict=True):
        choice.append(_place(copy.specs, spec(handed), [bool(each) == same for each in copy.same]))
    known = [number for number in choice if number is not None]
    return known if len(known) == len(choice) == len(formulation.problem.node_costs) else None


def _nearest(ways: Strategies, assignment: Assignment, ends: Sequence[Sharded]) -> int | None:
    """The strategy with that assignment and most of the wanted shardings at the boundary."""

    def equal(number: int) -> int:
        return sum(one == other for one, other in zip(_ends(ways, number), ends, strict=True))

    return max((n for n, other in enumerate(ways.assignments) if other == assignment), key=equal, default=None)


def _place(specs: Specs, wanted: Sharded, fits: Sequence[bool] | None = None) -> int | None:
    """The first strategy with the wanted sharding of a value."""
    places = (
        number for number in range(len(specs.index)) if specs[number] == wanted and (fits is None or fits[number])
    )
    return next(places, None)
