"""Reading and writing problems as IOPDDL JSON (ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism).

`{"problem": {"name": …, "nodes": {"intervals": [[start, end), …], "costs": […], "usages": […]},
"edges": {"nodes": [[u, v], …], "costs": [row-major, …]}, "usage_limit": …}}`; costs of 10^18 and more are forbidden
choices. A solution is a list with one strategy index per node.

The format has one usage vector and one interval per node, and none for edges. Further usages become extra nodes after
the real ones, tied to them (for an edge's usage: one strategy per pair, tied to both ends). Usages and costs are
integers: `write` scales costs, and rounds usages up and the limit down. Arrays of millions of numbers are checked as
arrays: a JSON schema would visit them one by one.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from autoshard import files, json_text
from autoshard.solver.problem import Array, Problem, Usage

INFINITE = 10**18
"""Costs from here on are forbidden choices (the contest's convention)."""
MAX_NUMBER = 1e300
"""No number is larger, so that sums of them stay finite."""
EXACT = 2**53
"""Whole numbers up to here are exact in float64."""


class FormatError(ValueError):
    """The file is not a problem in IOPDDL JSON; the message says where."""


def read(path: str | Path) -> Problem:
    """The problem in a file, gzipped when its name ends in .gz.

    Raises:
        FormatError: the content breaks the format; the message says where.
        OSError: the file cannot be read.
    """
    path = Path(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json_text.parse(data)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{path}: not JSON{' in gzip' if path.suffix == '.gz' else ''}: {error}") from error
    try:
        return from_json(document)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def from_json(document: Any) -> Problem:
    """The problem in a parsed document.

    Raises:
        FormatError: the document breaks the format; the message says where.
    """
    if not isinstance(document, dict) or not isinstance(document.get("problem"), dict):
        raise FormatError('the document has no object "problem"')
    problem = document["problem"]
    nodes, edges = problem.get("nodes"), problem.get("edges", {"nodes": [], "costs": []})
    for key, part, fields in (("nodes", nodes, ("intervals", "costs", "usages")), ("edges", edges, ("nodes", "costs"))):
        if not isinstance(part, dict) or not all(isinstance(part.get(f), list) for f in fields):
            raise FormatError(f"problem.{key} must have the lists {', '.join(fields)}")
    count = len(nodes["costs"])
    if not len(nodes["intervals"]) == len(nodes["usages"]) == count:
        raise FormatError("problem.nodes: intervals, costs and usages must be equally long")
    if len(edges["nodes"]) != len(edges["costs"]):
        raise FormatError("problem.edges: nodes and costs must be equally long")
    costs = [_costs(c, f"problem.nodes.costs[{i}]") for i, c in enumerate(nodes["costs"])]
    usages = []
    for i, (interval, amounts) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True)):
        where = f"problem.nodes.intervals[{i}]"
        if not (isinstance(interval, list) and len(interval) == 2 and all(_is_whole(t) for t in interval)):
            raise FormatError(f"{where} must be [start, end], whole numbers below 2^53")
        amount = _vector(amounts, f"problem.nodes.usages[{i}]")
        if amount.shape != costs[i].shape:
            raise FormatError(f"problem.nodes.usages[{i}] has {len(amount)} entries, costs[{i}] has {len(costs[i])}")
        if interval[0] < interval[1] and amount.any():
            usages.append(Usage(i, interval[0], interval[1], amount))
    pairs, matrices = [], []
    for e, (ends, flat) in enumerate(zip(edges["nodes"], edges["costs"], strict=True)):
        where = f"problem.edges.nodes[{e}]"
        if not (isinstance(ends, list) and all(_is_whole(i) and 0 <= i < count for i in ends)):
            raise FormatError(f"{where} must be two indices of nodes below {count}")
        if len(ends) != 2 or ends[0] == ends[1]:
            raise FormatError(f"{where} is {ends}: only edges between two different nodes are supported")
        vector = _costs(flat, f"problem.edges.costs[{e}]")
        shape = len(costs[ends[0]]), len(costs[ends[1]])
        if len(vector) != shape[0] * shape[1]:
            raise FormatError(f"problem.edges.costs[{e}] has {len(vector)} entries, expected {shape[0]} * {shape[1]}")
        pairs.append((ends[0], ends[1]))
        matrices.append(vector.reshape(shape))
    limit = problem.get("usage_limit")
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, int | float) or not abs(limit) <= MAX_NUMBER
    ):
        raise FormatError(f"problem.usage_limit must be null or a number of at most {MAX_NUMBER:g}")
    return Problem(costs, pairs, matrices, usages, (), None if limit is None else float(limit))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= EXACT


def _vector(values: Any, where: str) -> Array:
    try:
        vector = np.array(values)
    except ValueError:  # lists of several lengths
        vector = np.array([""])
    if vector.dtype.kind not in "iufO" and vector.size:
        raise FormatError(f"{where} must be a list of numbers")
    if vector.ndim != 1 or not len(vector):
        raise FormatError(f"{where} must be a list of at least one number")
    try:
        vector = vector.astype(np.float64)
    except OverflowError:
        raise FormatError(f"{where} has a number beyond {MAX_NUMBER:g}") from None
    except (TypeError, ValueError):
        raise FormatError(f"{where} must be a list of numbers") from None
    if not np.all(np.abs(vector) <= MAX_NUMBER):
        raise FormatError(f"{where} has a number beyond {MAX_NUMBER:g}, or something that is none")
    return vector


def _costs(values: Any, where: str) -> Array:
    vector = _vector(values, where)
    vector[vector >= INFINITE] = np.inf
    return vector


def write(problem: Problem, path: str | Path, *, name: str = "autoshard") -> float:
    """Write a problem; return its cost scale: costs in the file ÷ costs of the problem.

    Raises:
        FileError: the file cannot be written; nothing is left behind.
    """
    document, scale = to_json(problem, name=name)
    text = json.dumps(document, separators=(",", ":")).encode()
    path = Path(path)
    files.write(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return scale


def to_json(problem: Problem, *, name: str = "autoshard") -> tuple[dict[str, Any], float]:
    """The document of a problem, and its cost scale.

    The first nodes are the problem's; further ones carry usages that the format cannot express. The extension field
    `autoshard` holds the scale (`cost_scale`) and the nodes' names (`names`).
    """
    scale = _scale(problem)
    costs = list(problem.node_costs)
    pairs, matrices = list(problem.edges), list(problem.edge_costs)
    intervals = [[0, 0] for _ in costs]
    amounts: list[Array] = [np.zeros(len(c)) for c in costs]
    placed = [False] * len(costs)
    for usage in problem.node_usages:
        if usage.start >= usage.end:
            continue
        if not placed[usage.index]:
            placed[usage.index] = True
            intervals[usage.index], amounts[usage.index] = [usage.start, usage.end], usage.amount
        elif intervals[usage.index] == [usage.start, usage.end]:
            amounts[usage.index] = amounts[usage.index] + usage.amount
        else:
            k = len(usage.amount)
            pairs.append((usage.index, len(costs)))
            matrices.append(np.where(np.eye(k) > 0, 0.0, np.inf))
            costs.append(np.zeros(k))
            intervals.append([usage.start, usage.end])
            amounts.append(usage.amount)
    for usage in problem.edge_usages:
        if usage.start >= usage.end:
            continue
        u, v = problem.edges[usage.index]
        ku, kv = usage.amount.shape
        pair_u, pair_v = np.divmod(np.arange(ku * kv), kv)
        for node, k, own in ((u, ku, pair_u), (v, kv, pair_v)):
            pairs.append((node, len(costs)))
            matrices.append(np.where(np.arange(k)[:, None] == own[None, :], 0.0, np.inf))
        costs.append(np.zeros(ku * kv))
        intervals.append([usage.start, usage.end])
        amounts.append(usage.amount.ravel())

    def whole(values: Array) -> list[int]:
        return [INFINITE if math.isinf(x) else round(x * scale) for x in np.ravel(values).tolist()]

    document = {
        "problem": {
            "name": name,
            "nodes": {
                "intervals": intervals,
                "costs": [whole(c) for c in costs],
                "usages": [[math.ceil(x) for x in a.tolist()] for a in amounts],
            },
            "edges": {"nodes": [list(p) for p in pairs], "costs": [whole(m) for m in matrices]},
            "usage_limit": None if problem.limit is None else math.floor(problem.limit),
        },
        "autoshard": {"cost_scale": scale, "names": list(problem.names)},
    }
    return document, scale


def _scale(problem: Problem) -> float:
    """1 for integer costs; else a power of two that keeps the sum of the largest costs exact in float64."""
    arrays = {id(a): a for a in (*problem.node_costs, *problem.edge_costs)}
    finite = {key: a[np.isfinite(a)] for key, a in arrays.items()}
    if all(bool(np.all(a == np.floor(a))) for a in finite.values()):
        return 1.0
    high = {key: float(np.abs(a).max(initial=0.0)) for key, a in finite.items()}
    total = sum(high[id(a)] for a in (*problem.node_costs, *problem.edge_costs))
    return 2.0 ** math.floor(math.log2(EXACT / 4 / total))
