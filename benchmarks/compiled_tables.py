"""The tables of `benchmarks/compiled.py`, from its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tabulate import tabulate

Row = dict[str, Any]

SMALL_KIND = 0.01
"""A kind with a smaller part of the bytes, compiled and predicted, is not judged by itself."""

LIMITS = {"total": 0.10, "kind": 0.20, "memory": 0.15}
"""What auto and manual plans are to be within."""


def off(predicted: float, compiled: float) -> float:
    """How far a prediction is off, signed, as a part of what was compiled; 0/0 is 0."""
    if predicted == compiled:
        return 0.0
    return (predicted - compiled) / compiled if compiled else float("inf")


def total_off(row: Row) -> float:
    """Bytes of all collectives."""
    return off(row["predicted_bytes"], row["compiled_bytes"])


def worst_kind(row: Row) -> tuple[str, float]:
    """The kind of collective that is furthest off, over all axes, and how far."""
    sums: dict[str, list[int]] = {}
    for each in row["collectives"]:
        found = sums.setdefault(each["kind"], [0, 0])
        found[0] += each["predicted_bytes"]
        found[1] += each["compiled_bytes"]
    worst = ("", 0.0)
    for kind, (predicted, compiled) in sums.items():
        if max(predicted, compiled) >= SMALL_KIND * row["compiled_bytes"]:
            worst = max(worst, (kind, off(predicted, compiled)), key=lambda each: abs(each[1]))
    return worst


def memory_off(row: Row) -> float:
    """Peak bytes per device."""
    return off(row["memory"]["predicted_bytes"], row["memory"]["compiled_bytes"])


def flops_off(row: Row) -> float:
    """FLOPs of products per device."""
    return off(row["flops"]["predicted"], row["flops"]["compiled"])


def bytes_off(row: Row) -> float:
    """Bytes that one device's kernels read and write."""
    return off(row["bytes"]["predicted"], row["bytes"]["compiled"])


def percent(value: float) -> str:
    """Signed, in percent."""
    return f"{100 * value:+.1f}" if abs(value) >= 5e-4 else "0"


def tables(rows: list[Row], by_hand: list[str]) -> str:
    """What is off, per model and target; the plans' quality; and what is outside the limits."""
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        place = f"{row['target']} as {row['mesh']}"
        cells.setdefault((row["model"], place), {})[row["plan"]] = row
    parts = [
        ("Fidelity: bytes of collectives that differ / bytes compiled, %", lambda row: f"{100 * row['fidelity']:.1f}"),
        ("Bytes of all collectives, predicted / compiled - 1, %", lambda row: percent(total_off(row))),
        ("The kind of collective that is furthest off, %", lambda row: percent(worst_kind(row)[1])),
        ("Memory, predicted / compiled - 1, %", lambda row: percent(memory_off(row))),
        ("FLOPs of products, predicted / compiled - 1, %", lambda row: percent(flops_off(row))),
        ("Memory traffic of kernels, predicted / compiled - 1, %", lambda row: percent(bytes_off(row))),
    ]
    shown = [f"{title}\n{_table(cells, plans, cell)}" for title, cell in parts]
    shown.append("Step time of the compiled program under the device model, ms\n" + _quality(cells, by_hand))
    shown.append(_outside(rows, {"auto", *by_hand}))
    if len({row["sources"] for row in rows}) > 1:
        shown.append("These rows were made by different sources of autoshard: run the sweep again.")
    return "\n\n".join(shown)


def markdown(rows: list[Row], by_hand: list[str]) -> str:
    """For docs/fidelity.md: per plan fidelity, worst kind and memory in one cell; then the plans' quality."""
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["model"], f"{row['target']}, {row['mesh']}"), {})[row["plan"]] = row

    def cell(row: Row) -> str:
        return f"{100 * row['fidelity']:.1f} / {percent(worst_kind(row)[1])} / {percent(memory_off(row))}"

    tables = (_table(cells, plans, cell, "pipe"), _quality(cells, by_hand, "pipe"), _outside(rows, {"auto", *by_hand}))
    return "\n\n".join(tables)


def _table(
    cells: dict[tuple[str, str], dict[str, Row]], plans: list[str], cell: Callable[[Row], str], style: str = "simple"
) -> str:
    lines = []
    for place, found in cells.items():
        texts = [_shown(found.get(plan), cell) for plan in plans]
        lines.append([*place, *texts])
    return tabulate(lines, ["model", "target", *plans], style, disable_numparse=True)


def _shown(row: Row | None, cell: Callable[[Row], str]) -> str:
    if row is None:
        return ""
    if "fidelity" not in row:
        return "-" if "left_out" in row else "error"
    return "inf" if row["fidelity"] is None else cell(row)


def _quality(cells: dict[tuple[str, str], dict[str, Row]], by_hand: list[str], style: str = "simple") -> str:
    lines = []
    for place, found in cells.items():
        seconds = {plan: row["compiled"]["step_time_s"] for plan, row in found.items() if "compiled" in row}
        hand = [(seconds[plan], plan) for plan in by_hand if plan in seconds]
        texts = [f"{seconds[plan] * 1e3:.3f}" if plan in seconds else "" for plan in ["auto", *by_hand]]
        best = min(hand, default=None)
        ratio = f"{seconds['auto'] / best[0]:.3f}" if best and "auto" in seconds else ""
        lines.append([*place, *texts, best[1] if best else "", ratio])
    headers = ["model", "target", "auto", *by_hand, "best by hand", "auto / best"]
    return tabulate(lines, headers, style, disable_numparse=True)


def _outside(rows: list[Row], judged: set[str]) -> str:
    """Auto and manual plans outside the limits, one line each."""
    good = [row for row in rows if row["plan"] in judged and "fidelity" in row]
    lines = []
    for row in good:
        kind, kind_off = worst_kind(row)
        found = {"total": total_off(row), "kind": kind_off, "memory": memory_off(row)}
        wrong = [f"{name} {percent(found[name])}" for name, limit in LIMITS.items() if abs(found[name]) > limit]
        if wrong:
            about = f" ({kind})" if abs(kind_off) > LIMITS["kind"] else ""
            lines.append(f"  {row['model']} {row['target']} {row['mesh']} {row['plan']}: {', '.join(wrong)}{about}")
    errors, left_out = (
        [f"  {row['model']} {row['target']} {row['plan']}: {row[name]}" for row in rows if name in row]
        for name in ("error", "left_out")
    )
    limits = ", ".join(f"{name} {100 * limit:.0f} %" for name, limit in LIMITS.items())
    head = f"Auto and manual plans outside the limits ({limits}): {len(lines)} of {len(good)}"
    notes = [*(["Errors:", *errors] if errors else []), *(["Left out:", *left_out] if left_out else [])]
    return "\n".join([head, *lines, *notes])
