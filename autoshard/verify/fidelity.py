"""How near predicted collectives are to compiled ones (DESIGN section 10)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.cost.machine.collectives import Collective
from autoshard.mesh import AxisGroup
from autoshard.text import columns
from autoshard.verify.compiled_collective import CompiledCollective

Key = tuple[str, AxisGroup]
"""Kind and axes."""

_WORTH_NAMING = 1e-3
"""Kinds and axes whose totals agree to this part of all bytes have no culprits: labels say less than totals do."""


@dataclass(frozen=True)
class Row:
    """One kind over one set of axes; bytes per device and step."""

    kind: str
    axes: AxisGroup
    predicted_bytes: int
    compiled_bytes: int
    predicted_count: int
    compiled_count: int

    @property
    def difference(self) -> int:
        """|predicted - compiled| in bytes."""
        return abs(self.predicted_bytes - self.compiled_bytes)


@dataclass(frozen=True)
class Culprit:
    """An aten op whose collectives were predicted otherwise than compiled.

    Attributes:
        aten: its index, or None for what carries no label.
        name, module: as captured, empty where unknown.
        predicted, compiled: (kind, axes) -> bytes per device and step.
    """

    aten: int | None
    name: str
    module: str
    predicted: Mapping[Key, int] = field(hash=False)
    compiled: Mapping[Key, int] = field(hash=False)

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
        culprits: aten ops where they differ in a kind and axes whose totals differ, largest difference first.
    """

    target: str
    rows: tuple[Row, ...]
    culprits: tuple[Culprit, ...] = ()

    @property
    def predicted_bytes(self) -> int:
        """Bytes per device and step that were predicted."""
        return sum(row.predicted_bytes for row in self.rows)

    @property
    def compiled_bytes(self) -> int:
        """Bytes per device and step that the compiled program moves."""
        return sum(row.compiled_bytes for row in self.rows)

    @property
    def value(self) -> float:
        """Sum over (kind, axes) of |predicted - compiled| bytes, over the compiled bytes; 0 is exact, 0/0 is 0.

        Infinity when bytes were predicted and none compiled.
        """
        difference = sum(row.difference for row in self.rows)
        if difference == 0:
            return 0.0
        return difference / self.compiled_bytes if self.compiled_bytes else float("inf")

    def as_dict(self, culprits: int = 10) -> dict[str, Any]:
        """For `--json`: bytes per device and step; an infinite fidelity is None."""
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
        aten_of: graph op id (`Collective.op`) -> aten op; without it no culprits are named.
        names: aten op -> (name, module path), for the report.
    """
    predicted, compiled = list(predicted), list(compiled)
    before: dict[Key, tuple[int, int]] = {}
    after: dict[Key, tuple[int, int]] = {}
    for one in predicted:
        if one.bytes and one.count:
            _count(before, (one.kind, one.axes), one.bytes * one.count, one.count)
    for other in compiled:
        _count(after, (other.kind, other.axes), other.total_bytes, other.count)
    rows = tuple(
        Row(
            *key,
            before.get(key, (0, 0))[0],
            after.get(key, (0, 0))[0],
            before.get(key, (0, 0))[1],
            after.get(key, (0, 0))[1],
        )
        for key in sorted({*before, *after})
    )
    found = Fidelity(target, rows)
    if aten_of is None:
        return found
    total = max(found.predicted_bytes, found.compiled_bytes)
    wrong = {(row.kind, row.axes) for row in rows if row.difference > _WORTH_NAMING * total}
    return replace(found, culprits=_culprits(wrong, predicted, compiled, aten_of, names or {}))


def _culprits(
    wrong: Collection[Key],
    predicted: list[Collective],
    compiled: list[CompiledCollective],
    aten_of: Callable[[int], int | None],
    names: Mapping[int, tuple[str, str]],
) -> tuple[Culprit, ...]:
    """The aten ops behind the kinds and axes in `wrong`."""
    sides: dict[int | None, tuple[dict[Key, int], dict[Key, int]]] = {}

    def add(aten: int | None, side: int, key: Key, size: int) -> None:
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


def _count(totals: dict[Key, tuple[int, int]], key: Key, size: int, count: int) -> None:
    known = totals.get(key, (0, 0))
    totals[key] = (known[0] + size, known[1] + count)


def _listed(sizes: Mapping[Key, int]) -> list[dict[str, Any]]:
    return [{"kind": kind, "axes": [*map(str, axes)], "bytes": size} for (kind, axes), size in sorted(sizes.items())]


def _spoken(sizes: Mapping[Key, int]) -> str:
    named = ((kind, "+".join(map(str, axes)), size) for (kind, axes), size in sorted(sizes.items()))
    return ", ".join(f"{kind} {axes} {_mb(size)} MB" for kind, axes, size in named) or "none"


def _mb(size: int) -> str:
    """MB with as many digits as a small collective needs to show at all."""
    return f"{size / 1e6:.2f}" if size >= 5000 or size == 0 else f"{size / 1e6:.6f}"
