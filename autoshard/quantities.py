"""Parses quantities with units."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """`16GB` (10^9), `16GiB` (2^30), `1.5e9` as a number of bytes.

    Raises:
        ValueError: anything else, or nothing at all.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 0 < float(match[1]) * unit < float("inf"):
        raise ValueError(f"bytes are written 16GB (10^9), 16GiB (2^30) or 1.5e9, not {text!r}")
    return round(float(match[1]) * unit)
