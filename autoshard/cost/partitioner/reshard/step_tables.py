"""Reshards between many shardings, kept on disk: on three mesh axes a tensor of four dims has 37,000 pairs.

A table depends on the mesh's shape and axis names, the partitioner and the code that follows it, not on a model.
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
"""Kind of the one step of a reshard on which XLA ends the process: it takes for ever."""
LEAST_PAIRS = 2_000
"""Smaller tables are made anew faster than they are found."""


@dataclass(frozen=True)
class Step:
    """One collective of a reshard, for tensors of all sizes that divide equally (`reshard.Fit`).

    Attributes:
        kind: XLA's name.
        axes: what of the mesh it runs over.
        share: its bytes per device as a part of the whole tensor's (see `Collective.bytes`).
    """

    kind: CollectiveKind | Literal["crash"]
    axes: AxisGroup
    share: Fraction


@dataclass(frozen=True)
class StepTable:
    """`ways[index[i, j]]` are the collectives from sharding i to sharding j."""

    ways: Sequence[tuple[Step, ...]]
    index: npt.NDArray[np.int32]


def step_table(key: object, size: int, steps: Callable[[int, int], tuple[Step, ...]]) -> StepTable:
    """The table of `size` shardings, from the disk if it is there.

    Args:
        key: everything that `steps` depends on but code, with a `repr` that says it.
        size: how many shardings.
        steps: the collectives from sharding i to sharding j, i != j.
    """
    if size * size < LEAST_PAIRS:
        return _made(size, steps)
    digest = hashlib.sha256(f"{_sources()} {key!r}".encode()).hexdigest()[:32]
    try:
        path = files.cache_dir() / "reshards" / f"{digest}.json.gz"
    except FileError:
        return _made(size, steps)
    found = _read(path)
    if found is None:
        found = _made(size, steps)
        _write(path, found)
    return found


def _made(size: int, steps: Callable[[int, int], tuple[Step, ...]]) -> StepTable:
    numbers: dict[tuple[Step, ...], int] = {(): 0}
    index = np.zeros((size, size), dtype=np.int32)
    for i in range(size):
        for j in range(size):
            if i != j:
                index[i, j] = numbers.setdefault(steps(i, j), len(numbers))
    return StepTable(tuple(numbers), index)


@cache
def _sources() -> str:
    """The code that a table follows from."""
    here = Path(__file__)
    names = (here.name, "price.py", "steps.py", "device_tiles.py")
    return hashlib.sha256(b"".join(here.with_name(name).read_bytes() for name in names)).hexdigest()


def _write(path: Path, table: StepTable) -> None:
    """Keep a table; where that is not possible it is made again next time."""
    ways = [[[step.kind, [*map(str, step.axes)], str(step.share)] for step in way] for way in table.ways]
    document = {"ways": ways, "index": table.index.reshape(-1).tolist()}
    with contextlib.suppress(FileError):
        kept.write(path, gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 1, mtime=0))


def _read(path: Path) -> StepTable | None:
    """The table of a file; None where there is none, or not as it was written."""
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
