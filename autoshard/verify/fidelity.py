"""Compares predicted with compiled collectives by matching them, so that errors do not cancel.

Within one kind and set of axes a predicted transfer matches a compiled one of equal bytes, of the same aten op first,
then of any: compilers move labels. Several equal transfers match one as large as their sum, into which they were
combined. The rest is compared per op in total, since a transfer may be compiled in pieces; compiled bytes without a
label come last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.cost.machine.collectives import Collective
from autoshard.mesh import AxisGroup
from autoshard.text import columns
from autoshard.verify.compiled_collective import CompiledCollective

CollectiveKey = tuple[str, AxisGroup]
"""Kind and axes."""

Transfers = dict[int | None, Counter[int]]
"""Of one kind and axes: aten op, None where that is not known -> bytes of one transfer -> how many per step."""

_WORTH_NAMING = 1e-3
"""Kinds and axes whose unmatched bytes are below this fraction of all have no culprits: labels are less reliable than
sizes."""


@dataclass(frozen=True)
class Row:
    """One kind over one set of axes; bytes per device and step; `difference` is unmatched."""

    kind: str
    axes: AxisGroup
    predicted_bytes: int
    compiled_bytes: int
    predicted_count: int
    compiled_count: int
    difference: int


@dataclass(frozen=True)
class Culprit:
    """An aten op whose predicted and compiled collectives differ.

    Attributes:
        aten: its index, or None for collectives without a label.
        name, module: as captured, empty where unknown.
        predicted, compiled: (kind, axes) -> bytes per device and step.
    """

    aten: int | None
    name: str
    module: str
    predicted: Mapping[CollectiveKey, int] = field(hash=False)
    compiled: Mapping[CollectiveKey, int] = field(hash=False)

    @property
    def difference(self) -> int:
        """Bytes predicted but not compiled, or compiled but not predicted."""
        keys = {*self.predicted, *self.compiled}
        return sum(abs(self.predicted.get(key, 0) - self.compiled.get(key, 0)) for key in keys)


@dataclass(frozen=True)
class Fidelity:
    """Predicted against compiled collectives of one program on one target.

    Attributes:
        target: what it was compiled for.
        rows: per kind and axes, in a fixed order.
        culprits: aten ops behind the differences, largest first.
    """

    target: str
    rows: tuple[Row, ...]
    culprits: tuple[Culprit, ...] = ()

    @property
    def predicted_bytes(self) -> int:
        """Predicted bytes per device and step."""
        return sum(row.predicted_bytes for row in self.rows)

    @property
    def compiled_bytes(self) -> int:
        """Compiled bytes per device and step."""
        return sum(row.compiled_bytes for row in self.rows)

    @property
    def value(self) -> float:
        """Unmatched bytes of both sides over the compiled bytes; 0 is exact, 0/0 is 0.

        Infinity when bytes were predicted and none compiled.
        """
        difference = sum(row.difference for row in self.rows)
        if difference == 0:
            return 0.0
        return difference / self.compiled_bytes if self.compiled_bytes else float("inf")

    def as_dict(self, culprits: int = 10) -> dict[str, Any]:
        """For `--json`: bytes per device and step; an infinite value becomes None."""
        value = self.value
        return {
            "target": self.target,
            "fidelity": None if value == float("inf") else value,
            "predicted_bytes": self.predicted_bytes,
            "compiled_bytes": self.compiled_bytes,
            "collectives": [
                {
                    "kind": row.kind,
                    "axes": [*map(str, row.axes)],
                    "predicted_bytes": row.predicted_bytes,
                    "compiled_bytes": row.compiled_bytes,
                    "predicted_count": row.predicted_count,
                    "compiled_count": row.compiled_count,
                    "difference_bytes": row.difference,
                }
                for row in self.rows
            ],
            "differences": [
                {
                    "aten": culprit.aten,
                    "name": culprit.name,
                    "module": culprit.module,
                    "predicted": _listed(culprit.predicted),
                    "compiled": _listed(culprit.compiled),
                }
                for culprit in self.culprits[:culprits]
            ],
        }

    def table(self, culprits: int = 5) -> str:
        """Both sides per kind and axes, the total, and the ops where they differ most; MB are 10^6 bytes."""
        header = ("collective", "axes", "predicted MB", "compiled MB", "difference", "n predicted", "n compiled")
        body = [
            (
                row.kind,
                "+".join(map(str, row.axes)),
                _mb(row.predicted_bytes),
                _mb(row.compiled_bytes),
                _mb(row.difference),
                str(row.predicted_count),
                str(row.compiled_count),
            )
            for row in self.rows
        ]
        difference = sum(row.difference for row in self.rows)
        total = ("total", "", _mb(self.predicted_bytes), _mb(self.compiled_bytes), _mb(difference), "", "")
        lines = columns([header, *body, total], right_from=2)
        value = "none compiled, some predicted" if self.value == float("inf") else f"{self.value:.1%}"
        lines.append(f"fidelity on {self.target}: {value} of the compiled bytes differ")
        if self.culprits and culprits:
            lines.append("where they differ most:")
            for culprit in self.culprits[:culprits]:
                op = "ops without a label" if culprit.aten is None else f"op {culprit.aten} {culprit.name}".rstrip()
                where = f" in {culprit.module}" if culprit.module else ""
                lines.append(
                    f"  {op}{where}: predicted {_spoken(culprit.predicted)}; compiled {_spoken(culprit.compiled)}"
                )
        return "\n".join(lines)

    def __str__(self) -> str:
        """The table."""
        return self.table()


def fidelity(
    predicted: Iterable[Collective],
    compiled: Iterable[CompiledCollective],
    *,
    target: str = "",
    aten_of: Callable[[int], int | None] | None = None,
    names: Mapping[int, tuple[str, str]] | None = None,
) -> Fidelity:
    """Compare predicted with compiled collectives.

    Args:
        predicted: the cost model's; axes in mesh order.
        compiled: what `compiled_collectives` read.
        target: for the report.
        aten_of: graph op id (`Collective.op`) -> aten op; without it ops are not distinguished, and no culprits named.
        names: aten op -> (name, module path), for the report.
    """
    predicted, compiled = list(predicted), list(compiled)
    before: dict[CollectiveKey, Transfers] = defaultdict(dict)
    after: dict[CollectiveKey, Transfers] = defaultdict(dict)
    counts: dict[CollectiveKey, list[int]] = defaultdict(lambda: [0, 0])  # predicted, compiled
    for one in predicted:
        if one.bytes and one.count:
            key: CollectiveKey = (one.kind, tuple(one.axes))
            aten = aten_of(one.op) if aten_of is not None and one.op is not None else None
            before[key].setdefault(aten, Counter())[one.bytes] += one.count
            counts[key][0] += one.count
    for other in compiled:
        key = (other.kind, other.axes)
        for aten, size in other.parts or ((other.aten, other.bytes),):
            after[key].setdefault(None if aten_of is None else aten, Counter())[size] += other.count
        counts[key][1] += other.count
    rows = tuple(
        Row(*key, _total(before[key]), _total(after[key]), first, second, _unmatched(before[key], after[key]))
        for key, (first, second) in sorted(counts.items())
    )
    found = Fidelity(target, rows)
    if aten_of is None:
        return found
    total = max(found.predicted_bytes, found.compiled_bytes)
    wrong = {(row.kind, row.axes) for row in rows if row.difference > _WORTH_NAMING * total}
    return replace(found, culprits=_culprits(wrong, predicted, compiled, aten_of, names or {}))


def _unmatched(predicted: Transfers, compiled: Transfers) -> int:
    """Unmatched bytes of both sides, which are of one kind over the same axes."""
    same = {op: predicted[op] & compiled[op] for op in {*predicted} & {*compiled}}
    sides = [{op: sizes - same.get(op, Counter()) for op, sizes in side.items()} for side in (predicted, compiled)]
    moved = _summed(sides[0]) & _summed(sides[1])
    for side in sides:
        _take(moved, side)
    for whole, count in sorted(_summed(sides[1]).items(), reverse=True):
        for part, there in sorted(_summed(sides[0]).items(), reverse=True):
            joined = min(count, there * part // whole) if part < whole and whole % part == 0 else 0
            _take(Counter({part: joined * whole // part}), sides[0])
            _take(Counter({whole: joined}), sides[1])
            count -= joined
    rest = [{op: _bytes(sizes) for op, sizes in side.items()} for side in sides]
    excess = {op: rest[0].get(op, 0) - rest[1].get(op, 0) for op in {*rest[0], *rest[1]}}
    unknown = excess.pop(None, 0)
    more, less = (sum(max(0, sign * each) for each in excess.values()) for sign in (1, -1))
    known = less if unknown > 0 else more
    return more + less + abs(unknown) - 2 * min(known, abs(unknown))


def _culprits(
    wrong: Collection[CollectiveKey],
    predicted: list[Collective],
    compiled: list[CompiledCollective],
    aten_of: Callable[[int], int | None],
    names: Mapping[int, tuple[str, str]],
) -> tuple[Culprit, ...]:
    """The aten ops behind the kinds and axes in `wrong`."""
    sides: dict[int | None, tuple[dict[CollectiveKey, int], dict[CollectiveKey, int]]] = {}

    def add(aten: int | None, side: int, key: CollectiveKey, size: int) -> None:
        if key in wrong:
            totals = sides.setdefault(aten, ({}, {}))[side]
            totals[key] = totals.get(key, 0) + size

    for one in predicted:
        aten = aten_of(one.op) if one.op is not None else None
        add(aten, 0, (one.kind, one.axes), one.bytes * one.count)
    for other in compiled:
        for aten, size in other.parts or ((other.aten, other.bytes),):
            add(aten, 1, (other.kind, other.axes), size * other.count)
    found = [
        Culprit(aten, *(names.get(aten, ("", "")) if aten is not None else ("", "")), before, after)
        for aten, (before, after) in sides.items()
    ]
    differing = [culprit for culprit in found if culprit.difference]
    return tuple(
        sorted(differing, key=lambda culprit: (-culprit.difference, -1 if culprit.aten is None else culprit.aten))
    )


def _summed(side: Transfers) -> Counter[int]:
    return sum(side.values(), Counter())


def _take(some: Counter[int], side: Transfers) -> None:
    """Remove that many transfers of each size, of any op."""
    left = Counter(some)
    for sizes in side.values():
        taken = sizes & left
        sizes -= taken
        left -= taken


def _bytes(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _total(transfers: Transfers) -> int:
    return sum(map(_bytes, transfers.values()))


def _listed(sizes: Mapping[CollectiveKey, int]) -> list[dict[str, Any]]:
    return [{"kind": kind, "axes": [*map(str, axes)], "bytes": size} for (kind, axes), size in sorted(sizes.items())]


def _spoken(sizes: Mapping[CollectiveKey, int]) -> str:
    named = ((kind, "+".join(map(str, axes)), size) for (kind, axes), size in sorted(sizes.items()))
    return ", ".join(f"{kind} {axes} {_mb(size)} MB" for kind, axes, size in named) or "none"


def _mb(size: int) -> str:
    """MB with enough digits for a small collective."""
    return f"{size / 1e6:.2f}" if size >= 5000 or size == 0 else f"{size / 1e6:.6f}"
