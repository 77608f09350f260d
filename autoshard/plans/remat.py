"""What is recomputed in the backward pass, by block, and as the value of the capture switch `remat:…`.

`remat:all=model.layers.0-19;products=model.layers.20-31` recomputes twenty blocks, keeps the results of products and
attentions of twelve more, and everything of the rest; `remat:none` keeps everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PRODUCTS, ATTENTION, ALL = "products", "attention", "all"
LEVELS = (PRODUCTS, ATTENTION, ALL)
"""Recomputed of a block: all but results of products and attentions, all but those of attentions, or all."""
Remat = Mapping[str, str]
"""Path of a block -> its level; other blocks keep everything."""
Blocks = tuple[str, ...]
"""Paths of equal blocks of a model: children of one container, of one class, with parameters of the same shapes."""


def switch_value(remat: Remat) -> str:
    """The part after the colon of the switch that recomputes as `remat` says."""
    parts = []
    for level in LEVELS:
        runs: list[tuple[str, int, int]] = []
        for path in (path for path, own in remat.items() if own == level):
            prefix, _, number = path.rpartition(".")
            if not number.isdecimal():
                runs.append((path, -1, -1))
            elif runs and runs[-1][0] == prefix and runs[-1][2] + 1 == int(number):
                runs[-1] = prefix, runs[-1][1], int(number)
            else:
                runs.append((prefix, int(number), int(number)))
        if runs:
            parts.append(f"{level}={','.join(map(_run, runs))}")
    return ";".join(parts) or "none"


def _run(run: tuple[str, int, int]) -> str:
    prefix, first, last = run
    dot = f"{prefix}." if prefix else ""
    return prefix if first < 0 else f"{dot}{first}" if first == last else f"{dot}{first}-{last}"


def _paths(run: str) -> list[str]:
    several = re.fullmatch(r"((?:.*\.)?)(\d+)-(\d+)", run)
    if several is None:
        return [run]
    prefix, first, last = several.groups()
    return [f"{prefix}{i}" for i in range(int(first), int(last) + 1)]


def remat_of(value: str) -> dict[str, str]:
    """The inverse of `switch_value`.

    Raises:
        ValueError: another text.
    """
    found: dict[str, str] = {}
    for part in value.split(";") if value != "none" else ():
        level, equals, runs = part.partition("=")
        if level not in LEVELS or not equals:
            raise ValueError(f"remat:{value}: {part!r} is not LEVEL=BLOCKS, where levels are {', '.join(LEVELS)}")
        for run in runs.split(","):
            found.update(dict.fromkeys(_paths(run), level))
    return found
