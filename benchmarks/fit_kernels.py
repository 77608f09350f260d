"""Fits `cost/machine/measured.toml` to tables of measured kernels.

    python -m benchmarks.fit_kernels gemm.csv.gz attention_forward.csv.gz nccl.csv.gz [--only h100] [--write | --check]

Tables by their columns: products (device, dtype, m, n, k, us), fused causal attention (device, dtype, batch, seq,
heads, kv_heads, head_dim, window, us; window 0: none), collectives (device, op, gpus, message_elements of two bytes,
us). Rows that a hash of their key holds out are never fitted, and the errors in the file are those on them; without
--write or --check they are not looked at, and errors are printed of rows that were fitted.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import hashlib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autoshard.cost.machine import fused_attention, measured, products
from autoshard.cost.machine.device import Device, load_device

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Sets = Mapping[str, Mask]
"""Name of a set of rows -> which rows are of it."""

HELD_OUT = 0.2
"""The share of keys (pairs of n and k, m, batch and length, size of a message) that are held out."""
SOURCE = """Collectors of github.com/ai-dynamo/aiconfigurator (Apache-2.0): TensorRT-LLM's bf16 products (cuBLAS), its
fused causal attention of prompts, NCCL's collectives on one host. A product reads another weight every time."""
FILE = Path(measured.__file__).with_name("measured.toml")

PRODUCTS = {  # start, least, most
    "launch": (2e-6, 1e-7, 1e-5), "sharp": (4, 1.5, 20), "spread": (0.05, 0.005, 0.3), "whole": (0.8, 0.01, 1),
    "read": (0.85, 0.3, 1), "write": (0.8, 0.2, 1), "warm": (3, 1, 15), "tiles": (5, 0.5, 50),
    "cache": (4e7, 4e6, 4e8), "others": (5, 0.5, 20), "store": (4, 0.05, 20), "hidden": (0.5, 0.01, 1),
    "split": (2e-6, 5e-8, 2e-5), "split_store": (1, 0.05, 20), "expected_split": (4e-6, 1e-8, 5e-5),
    "expected_part": (0.05, 1e-3, 1),
    "slower": (0.15, 1e-3, 1), "slower_after": (1e-3, 1e-5, 0.1),
}  # fmt: skip
LARGE = 65536
"""Bytes from which messages count in full."""
SHAPES = ((256, 128), (192, 128), (128, 128), (256, 64), (128, 64), (64, 64), (128, 32), (64, 32))
ATTENTION = {
    "launch": (1e-5, 1e-6, 5e-5), "block": (1e-6, 1e-8, 1e-4), "rate": (0.6, 0.1, 1), "read": (0.7, 0.1, 1),
    "sharp": (2, 1, 20), "beside": (2, 1, 10), "diagonal": (128, 0.1, 2000), "edge": (128, 1, 2000),
    "again": (2, 0.1, 40),
}  # fmt: skip
SMOOTH, ALIKE, LINK = 0.02, 0.1, 0.15
"""Weights beside one row: neighbouring slopes alike, those of all groups, large messages at the link's bandwidth."""


def share(key: object) -> float:
    """A number in [0, 1) that only depends on the key."""
    return int(hashlib.sha1(str(key).encode()).hexdigest()[:8], 16) / 2**32


def fitted(residuals: Callable[[Array], Array], start: Array, ranges: Array, scale: float, rounds: int) -> Any:
    """Least squares in the logarithms of constants within their ranges, with outliers as a first power."""
    least, most = np.log(ranges)
    inside = np.clip(start, least + 1e-6, most - 1e-6)
    return least_squares(residuals, inside, bounds=(least, most), loss="soft_l1", f_scale=scale, max_nfev=rounds)


# --- products: rows [m, n, k, seconds] ----------------------------------------------------------------------------


def product_sets(table: Array) -> Sets:
    """Rows beyond the range of the others, of whole pairs of n and k, of whole m; and fewer than 256 of m in these."""
    m, n, k = table.T[:3]
    beyond = (np.maximum(n, k) >= 65536) | (m >= 32768)
    pairs = np.array([share((int(a), int(b))) < HELD_OUT for a, b in zip(n, k, strict=True)]) & ~beyond
    rows = np.array([share(int(each)) < HELD_OUT for each in m]) & ~beyond & ~pairs
    large = m >= 256
    small = (pairs | rows) & ~large
    return {"pairs": pairs & large, "rows": rows & large, "small": small, "beyond": beyond & large, "": beyond & ~large}


def product_constants(values: Array) -> products.Constants:
    """The constants at a point of the search."""
    rates, expected = values[len(PRODUCTS) :].reshape(2, -1)
    shapes = tuple((*map(float, s), float(r), float(e)) for s, r, e in zip(SHAPES, rates, expected, strict=True))
    return products.Constants(**dict(zip(PRODUCTS, map(float, values), strict=False)), shapes=shapes)  # type: ignore[arg-type]


def of_products(of: products.Constants, table: Array, device: Device) -> Array:
    """Seconds of the rows by the model."""
    m, n, k = table.T[:3]
    return products.product_seconds(np.ones(len(table)), m, n, k, of, device, "bf16")


def fit_products(table: Array, device: Device, starts: int = 8) -> products.Constants:
    """The constants with the least error of log seconds: several starts on few rows, the best one on more."""
    rates = [0.95 * min(1, a * b / 32768) ** 0.2 for a, b in SHAPES]
    expected = [0.95 * min(1, a * b / 32768) ** 0.4 for a, b in SHAPES]
    others = (rates + expected, [0.1] * 2 * len(SHAPES), [1.0] * 2 * len(SHAPES))
    start, *ranges = (np.array([*(each[i] for each in PRODUCTS.values()), *others[i]]) for i in range(3))
    chance, whole = np.where(table[:, 0] >= 256, 1.0, 0.3), list(PRODUCTS).index("whole")

    def search(at: Array, rows: int, rounds: int, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        some = table[rng.choice(len(table), min(rows, len(table)), replace=False, p=chance / chance.sum())]
        off = lambda at: np.log(of_products(product_constants(np.exp(at)), some, device) / some[:, 3])  # noqa: E731
        return fitted(off, at, np.array(ranges), 0.1, rounds)

    tries = []
    for seed in range(starts):
        at = np.log(start) + np.random.default_rng(seed).normal(size=len(start)) * (0.3 if seed > 1 else 0)
        at[whole] = np.log((0.97, 0.2)[seed % 2])
        tries.append(search(search(at, 500, 15, seed).x, 1000, 12, 99))
    return product_constants(np.exp(search(min(tries, key=lambda each: each.cost).x, 3000, 30, 100).x))


# --- attention: rows [batch, length, heads, kv heads, head size, window, seconds] ----------------------------------


def attention_sets(table: Array) -> Sets:
    """Rows of whole pairs of batch and length."""
    out = np.array([share((int(batch), int(length))) < HELD_OUT for batch, length in table[:, :2]])
    short, windows = table[:, 1] < 256, table[:, 5] > 0
    return {"short": out & short & ~windows, "long": out & ~short & ~windows, "windows": out & windows}


def of_attention(of: fused_attention.Constants, table: Array, device: Device) -> Array:
    """Seconds of the rows by the model."""
    batch, length, heads, kv_heads, features, window = table.T[:6]
    longest = np.where(window > 0, np.minimum(window, length), length)
    attended = longest * (longest + 1) / 2 + (length - longest) * longest
    shape = fused_attention.Shape(batch, heads, kv_heads, length, length, features, attended, longest)
    return fused_attention.attention_seconds(shape, of, device, "bf16")


def fit_attention(table: Array, device: Device) -> fused_attention.Constants:
    """The constants of one head size: first without windows, then the edge of a window."""
    start, *ranges = np.array(list(ATTENTION.values())).T
    edge = list(ATTENTION).index("edge")
    whole, windows = table[table[:, 5] == 0], table[table[:, 5] > 0]

    def constants(at: Array, rows: float) -> fused_attention.Constants:
        return fused_attention.Constants(**dict(zip(ATTENTION, map(float, np.exp(at)), strict=True)), rows=rows)

    def off(at: Array, some: Array, rows: float) -> Array:
        return np.log(of_attention(constants(at, rows), some, device) / some[:, 6])

    tries = []
    for rows in (64.0, 128.0):
        of_rows = functools.partial(off, some=whole, rows=rows)
        tries.append((fitted(of_rows, np.log(start), np.array(ranges), 0.06, 200), rows))
    found, rows = min(tries, key=lambda each: each[0].cost)
    at = found.x
    if len(windows):
        with_edge = lambda value: off(np.array([*at[:edge], *value, *at[edge + 1 :]]), windows, rows)  # noqa: E731
        at[edge] = fitted(with_edge, np.log(start[[edge]]), np.array(ranges)[:, [edge]], 0.06, 50).x[0]
    return constants(at, rows)


# --- collectives: by group, rows [bytes, seconds] of one kind ------------------------------------------------------


def of_collectives(curve: measured.Curve, table: Array) -> Array:
    """Seconds of the rows by the model."""
    return np.array([curve.seconds(size) for size in table[:, 0]])


def fit_collectives(tables: Mapping[int, Array], per_byte: Mapping[int, float]) -> dict[int, measured.Curve]:
    """The curve of every group; `per_byte`: seconds by the link's bandwidth."""
    count = len(measured.KNOTS) + 2
    weights = {group: np.where(table[:, 0] >= LARGE, 1.0, 0.3) for group, table in tables.items()}

    def curves(at: Array) -> dict[int, measured.Curve]:
        rows = zip(tables, np.exp(at.reshape(-1, count)).tolist(), strict=True)
        return {group: measured.Curve(row[0], tuple(per_byte[group] * each for each in row[1:])) for group, row in rows}

    def off(at: Array) -> Array:
        slopes = at.reshape(-1, count)[:, 1:]
        found = curves(at)
        rows = [weights[group] * np.log(of_collectives(found[group], of) / of[:, 1]) for group, of in tables.items()]
        beside = (SMOOTH * np.diff(slopes), ALIKE * (slopes - slopes.mean(axis=0)), LINK * slopes[:, -1])
        return np.concatenate([*rows, *(each.ravel() for each in beside)])

    least = [np.log(table[:, 1].min()) for table in tables.values()]
    start = np.concatenate([[each, *np.linspace(1.5, 0, count - 1)] for each in least])
    ranges = np.exp(np.array([start - 5, start + 5]))
    return curves(fitted(off, start, ranges, 0.05, 100).x)


def left_out(tables: Mapping[int, Array], per_byte: Mapping[int, float]) -> dict[int, Array]:
    """Seconds of every row by a model that saw no row of its group and size."""
    found = {group: np.zeros(len(table)) for group, table in tables.items()}
    for group, table in tables.items():
        for size in np.unique(table[:, 0]):
            out = table[:, 0] == size
            curve = fit_collectives({**tables, group: table[~out]}, per_byte)[group]
            found[group][out] = of_collectives(curve, table[out])
    return found


KINDS = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}


# --- tables in, one file out --------------------------------------------------------------------------------------


class Fit:
    """What is found of one device; or its errors by what was found before, `known`."""

    def __init__(self, kind: str, known: measured.Measured | None, *, held_out: bool) -> None:
        self.device, self.known, self.held_out = load_device(kind), known, held_out
        self.found: dict[str, Any] = {"source": SOURCE, "most": {}, "products": {}, "attention": {}, "collectives": {}}
        self.predicted: dict[str, list[tuple[Array, Array]]] = {}  # by set of rows

    def note(self, model: str, sets: Sets, seconds: Array, table: Array) -> None:
        """Keep predicted and measured seconds of rows that are held out, and of those that are fitted."""
        for name, rows in (*sets.items(), ("fitted", _left(sets))):
            if name and rows.any():
                self.predicted.setdefault(f"{model}-{name}", []).append((seconds[rows], table[rows, -1]))

    def products(self, table: Array) -> None:
        """Rows [m, n, k, seconds]."""
        sets = product_sets(table)
        rows = table[_left(sets)]
        of = self.known.products if self.known else fit_products(rows, self.device)
        self.found["products"] = vars(of)
        self.found["most"]["products"] = float(rows[:, :3].max())
        self.note("products", sets, of_products(of, table, self.device), table)

    def attention(self, table: Array) -> None:
        """Rows [batch, length, heads, kv heads, head size, window, seconds]."""
        for size in map(int, np.unique(table[:, 4])):
            rows = table[table[:, 4] == size]
            sets = attention_sets(rows)
            of = self.known.attention[size] if self.known else fit_attention(rows[_left(sets)], self.device)
            self.found["attention"][str(size)] = vars(of)
            self.note("attention", sets, of_attention(of, rows, self.device), rows)
        self.found["most"]["attention"] = float(table[:, 1].max())

    def collectives(self, kind: str, tables: Mapping[int, Array]) -> None:
        """By group, rows [bytes, seconds]."""
        passes, bandwidth = 2 if kind == "all-reduce" else 1, self.device.links[0].bandwidth
        per_byte = {group: passes * (group - 1) / group / bandwidth for group in tables}
        of = self.known.collectives[kind] if self.known else fit_collectives(tables, per_byte)
        self.found["collectives"][kind] = {str(group): [each.start, *each.slopes] for group, each in of.items()}
        most = max(float(table[:, 0].max()) for table in tables.values())
        self.found["most"]["collectives"] = max(self.found["most"].get("collectives", 0.0), most)
        unseen = left_out(tables, per_byte) if self.held_out else {}
        for group, table in tables.items():
            large = table[:, 0] >= LARGE
            for name, rows in (("small", ~large), ("large", large)) if unseen else ():
                self.note("collectives", {name: rows, "": ~rows}, unseen[group], table)
            self.note("collectives", {"": ~np.isfinite(table[:, 0])}, of_collectives(of[group], table), table)

    def errors(self) -> dict[str, dict[str, float]]:
        """Of each set of rows the number, and the median, 90th percentile and largest of relative errors."""
        found = {}
        for name, pairs in sorted(self.predicted.items()):
            if self.held_out is not name.endswith("-fitted"):
                predicted, seconds = (np.concatenate(each) for each in zip(*pairs, strict=True))
                off = np.abs(predicted / seconds - 1)
                figures = {"median": np.median(off), "p90": np.quantile(off, 0.9), "worst": off.max()}
                found[name] = {"rows": len(off), **{key: round(float(value), 3) for key, value in figures.items()}}
        return found


def _left(sets: Sets) -> Mask:
    return np.logical_not(np.any(list(sets.values()), axis=0))


def read(paths: Iterable[str], only: Sequence[str], *, anew: bool, held_out: bool) -> dict[str, Fit]:
    """Every device of the tables, fitted anew or as the file says."""
    fits: dict[str, Fit] = {}
    for path in paths:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            rows = list(csv.DictReader(file))
        for kind in dict.fromkeys(row["device"] for row in rows):
            if not only or kind in only:
                known = None if anew else measured.measured(kind)
                of_table(
                    fits.setdefault(kind, Fit(kind, known, held_out=held_out)),
                    [row for row in rows if row["device"] == kind],
                )
    return fits


def of_table(fit: Fit, rows: Sequence[Mapping[str, str]]) -> None:
    """Fit what the columns say this is."""

    def table(*names: str) -> Array:
        return np.array([[*(float(row[name]) for name in names), float(row["us"]) * 1e-6] for row in rows])

    if "head_dim" in rows[0]:
        fit.attention(table("batch", "seq", "heads", "kv_heads", "head_dim", "window"))
    elif "gpus" in rows[0]:
        sizes = table("message_elements") * [2, 1]
        of = np.array([[row["op"], row["gpus"]] for row in rows])
        for op, kind in KINDS.items():
            groups = sorted({int(group) for name, group in of if name == op})
            fit.collectives(kind, {group: sizes[(of == [op, str(group)]).all(axis=1)] for group in groups})
    else:
        found = table("m", "n", "k")
        fit.products(found[found[:, 0] > 0])


def text(kind: str, found: Mapping[str, Any]) -> str:
    """One device as TOML."""

    def value(of: Any) -> str:
        if isinstance(of, Mapping):
            return "{ " + ", ".join(f"{key} = {value(each)}" for key, each in of.items()) + " }"
        if isinstance(of, list | tuple):
            return "[" + ", ".join(map(value, of)) + "]"
        whole = not isinstance(of, float) or (of == int(of) and of > 1)
        return f"{of:.0f}" if whole else f"{of:.4g}"

    lines = [f"[{kind}]", f'source = """{found["source"]}"""']
    for name in ("most", "products", "attention", "collectives", "errors"):
        lines += ["", f"[{kind}.{name}]", *(f"{key} = {value(each)}" for key, each in found[name].items())]
    return "\n".join(lines)


HEAD = """\
# Models fitted to measured kernels and collectives: `python -m benchmarks.fit_kernels` writes this file.
#
# most         the largest size that was measured: of m, n, k; of a prompt; of a message in bytes.
# products     constants of `products.py`; shapes: rows, columns, rate, and the rate that the library expects.
# attention    constants of `fused_attention.py` by head size.
# collectives  by kind and group size: start (s), and seconds per byte up to each of `measured.KNOTS` and beyond.
# errors       relative, on rows that were not fitted: products of whole pairs of n and k, of whole m, of either with
#              m < 256, with sizes beyond the largest fitted; attention of whole pairs of batch and length, shorter than
#              256, longer, with windows; messages below 64 KiB and from there, of models without that size of the group
#              (the file's saw all sizes).
"""


def main() -> None:
    """Fit; write, or print errors of what was fitted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="+", metavar="FILE.csv[.gz]")
    parser.add_argument("--only", action="append", default=[], metavar="KIND")
    parser.add_argument("--write", action="store_true", help="write the file, with errors on rows held out")
    parser.add_argument("--check", action="store_true", help="fit nothing: the file's errors on rows held out")
    asked = parser.parse_args()
    fits = read(asked.tables, asked.only, anew=not asked.check, held_out=asked.write or asked.check)
    for kind, fit in fits.items():
        fit.found["errors"] = fit.errors()
        for name, error in fit.found["errors"].items():
            print(kind, name, error, flush=True)
    if asked.write:
        document = tomllib.loads(FILE.read_text())
        for kind, fit in fits.items():
            entry = document.setdefault(kind, {})
            for name, of in fit.found.items():
                entry[name] = {**entry.get(name, {}), **of} if isinstance(of, Mapping) else of
        FILE.write_text("\n\n".join([HEAD.rstrip(), *(text(kind, of) for kind, of in document.items())]) + "\n")


if __name__ == "__main__":
    main()
