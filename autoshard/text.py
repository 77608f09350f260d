"""Aligned text tables; rich would need more lines to disable wrapping, padding and markup, and 0.04 s of import."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right_from: int | None = None) -> list[str]:
    """Rows as aligned lines; columns from `right_from` on are aligned right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right_from is not None and i >= right_from else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
