"""Tables of reshards, cached on disk: on three mesh axes a tensor of four dims has 37,000 pairs of shardings.

A table depends on the mesh's shape and axis names, the partitioner and this code, not on a model.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from autoshard import files, kept
from autoshard.cost.machine.collectives import CollectiveKind
from autoshard.errors import FileError
from autoshard.mesh import AxisGroup, parse_axes

CRASH: Literal["crash"] = "crash"
"""Kind of the step that stands for a reshard on which XLA crashes: its cost is infinite."""
Near = npt.NDArray[np.bool_]
LEAST_PAIRS = 2_000
"""Smaller tables are computed faster than read."""


@dataclass(frozen=True)
class Step:
    """One collective of a reshard, for tensors of all sizes that divide equally (`reshard.Fit`).

    Attributes:
        kind: XLA's name.
        axes: the mesh axes, or parts of axes, it runs over.
        share: its bytes per device as a fraction of the global tensor's (see `Collective.bytes`).
    """

    kind: CollectiveKind | Literal["crash"]
    axes: AxisGroup
    share: Fraction


NEVER = Step(CRASH, (), Fraction(0))
"""Stands for a direct reshard that no plan takes."""


@dataclass(frozen=True)
class StepTable:
    """`ways[index[i, j]]` are the collectives from sharding i to sharding j."""

    ways: Sequence[tuple[Step, ...]]
    index: npt.NDArray[np.int32]


def step_table(key: object, size: int, steps: Callable[[int, int], tuple[Step, ...]], near: Near) -> StepTable:
    """The table of `size` shardings, from disk if present.

    Args:
        key: everything that `steps` depends on but code; its `repr` names the file.
        size: how many shardings.
        steps: the collectives from sharding i to sharding j, i != j.
        near: (size, size): the pairs to be worked out. The others are `NEVER`.
    """
    if size * size < LEAST_PAIRS:
        return _made(size, steps, near)
    digest = hashlib.sha256(f"{_sources()} {key!r}".encode()).hexdigest()[:32]
    try:
        path = files.cache_dir() / "reshards" / f"{digest}.json.gz"
    except FileError:
        return _made(size, steps, near)
    found = _read(path)
    if found is None:
        found = _made(size, steps, near)
        _write(path, found)
    return found


def _made(size: int, steps: Callable[[int, int], tuple[Step, ...]], near: Near) -> StepTable:
    numbers: dict[tuple[Step, ...], int] = {(): 0, (NEVER,): 1}
    index = np.where(near, 0, 1).astype(np.int32)
    for i, j in np.argwhere(near & ~np.eye(size, dtype=np.bool_)).tolist():
        index[i, j] = numbers.setdefault(steps(i, j), len(numbers))
    return StepTable(tuple(numbers), index)


@cache
def _sources() -> str:
    """The source files that a table depends on."""
    here = Path(__file__)
    names = (here.name, "price.py", "steps.py", "device_tiles.py")
    return hashlib.sha256(b"".join(here.with_name(name).read_bytes() for name in names)).hexdigest()


def _write(path: Path, table: StepTable) -> None:
    """Write a table to disk if possible."""
    ways = [[[step.kind, [*map(str, step.axes)], str(step.share)] for step in way] for way in table.ways]
    document = {"ways": ways, "index": table.index.reshape(-1).tolist()}
    with contextlib.suppress(FileError):
        kept.write(path, gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 1, mtime=0))


def _read(path: Path) -> StepTable | None:
    """The table in a file; None where there is none or it is damaged."""
    try:
        content = kept.read(path)
    except kept.DamagedError:
        return None
    if content is None:
        return None
    document: Any = json.loads(gzip.decompress(content))
    ways = [
        tuple(Step(kind, parse_axes(axes), Fraction(share)) for kind, axes, share in way) for way in document["ways"]
    ]
    size = math.isqrt(len(document["index"]))
    return StepTable(ways, np.array(document["index"], dtype=np.int32).reshape(size, size))
