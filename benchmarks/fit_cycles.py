"""Fits `cost/machine/cycles.toml` to what libtpu says that kernels take.

    python benchmarks/fit_cycles.py --measure tpu-v5e:2x4 --seeds 0:20     # compile random nets, keep their kernels
    python benchmarks/fit_cycles.py --products tpu-v5e:2x4 --seeds 0:40    # compile chains of products, keep these
    python benchmarks/fit_cycles.py --convolutions tpu-v5e:2x4 --seeds 0:40    # and single convolutions
    python benchmarks/fit_cycles.py --write tpu-v5e                        # fit, with errors on the nets held out
    python benchmarks/fit_cycles.py --check tpu-v5e                        # these errors again
    python benchmarks/fit_cycles.py --write tpu-v5e --only streamed,wide  # fit these constants alone
    python benchmarks/fit_cycles.py --check tpu-v5e --into convolutions    # write those of convolutions

A net (`random_steps.py`) is split by a plan by hand that its seed draws, and compiled to the end, a CPU minute or two.
Chains of products (`random_products.py`) and single convolutions with their gradients (`random_convolutions.py`) take
seconds. Kernels are kept in `out/cycles/`, per seed, and not made again.
Every third seed is held out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import random_convolutions
import random_products
from compiled import mesh_on
from random_steps import step
from scipy.optimize import least_squares

from autoshard import manual
from autoshard.cost.machine import cycles
from autoshard.cost.machine.cycles import CLASSES, Array, Constants, away_share, kernel_cycles, product_cycles
from autoshard.cost.machine.device import Device, load_device
from autoshard.errors import AutoshardError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.compile import CompileError, compile_module
from autoshard.verify.cycles import estimate_of
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.registers import registers
from autoshard.verify.targets import parse_target
from autoshard.verify.work import Work

OUT = Path("out/cycles")
FILE = Path(cycles.__file__).with_name("cycles.toml")
HELD_OUT = 3
DEVICES, MESHES = 8, ("8", "2x4", "4x2")
START = {
    "start": 1800, "product_start": 500, "narrow_start": 2000, "wait": 500, "sharp": 3, "window": 4e6, "memory": 0.8,
    "rate": 1.0, "packed": 10, "packed_near": 5, "stored": 1, "streamed": 10, "wide": 4, "loaded": 0.1,
    "weights": 0.1, "fused": 1,
}  # fmt: skip
VECTOR = (1, 1, 3, 0.5, 1, 1, 0.3, 10, 10)
LANES = {"tpu-v6e": 256}


def by_hand(graph: Graph, mesh: Mesh, of: random.Random) -> Annotations:
    """The first plan by hand, in drawn order, that the program has."""
    names = list(manual.PLANS)
    of.shuffle(names)
    for name in names:
        try:
            return manual.PLANS[name](graph, mesh)
        except AutoshardError:
            continue
    raise ValueError("no plan by hand")


def kernels(text: str) -> Iterator[dict[str, Any]]:
    """Kernels with an estimate, and what they do; equal ones once, with their number."""
    work = Work(parse_hlo(text), on_chip_is_free=True)
    found: dict[str, int] = {}
    for computation in work.module.computations.values():
        for one in computation.instructions.values():
            estimate = estimate_of(one)
            if not estimate or one.opcode == "copy":
                continue
            done = registers(work.module, work.flops, computation, one)
            if done is None or len(done.products) > 1:
                continue
            moved = sum(kernel.bytes for kernel in work.at(computation, one))
            key = json.dumps(asdict(done) | {"moved": moved, "cycles": estimate}, sort_keys=True)
            found[key] = found.get(key, 0) + 1
    for key, count in found.items():
        yield {**json.loads(key), "count": count}


def net(seed: int, target_text: str) -> bytes:
    """The annotated program of a net, for eight devices."""
    of = random.Random(seed + 10**6)
    graph, mesh = step(seed), mesh_on(target_text, of.choice(MESHES))
    return annotate(graph.program, graph, by_hand(graph, mesh, of), mesh)


def measure(target_text: str, seeds: Sequence[int], name: str, module: Callable[[int, str], bytes]) -> None:
    """Compile what is not kept yet."""
    folder = OUT / target_text.partition(":")[0]
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        path = folder / f"{name}{seed}.jsonl"
        if path.exists():
            continue
        try:
            compiled = compile_module(module(seed, target_text), parse_target(target_text, DEVICES), whole=True)
        except CompileError as error:  # libtpu 0.0.51 crashes on one of 45 modules of products for v4
            print(seed, error, file=sys.stderr, flush=True)
            continue
        rows = [json.dumps(row) for row in kernels(compiled.hlo_text)]
        path.write_text("\n".join(rows) + "\n")
        print(seed, len(rows), "kernels", f"{compiled.seconds:.0f} s", file=sys.stderr, flush=True)


class Table:
    """Kernels as arrays."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Of `kernels`."""
        names = ("batch", "m", "n", "k", "taps", "tiles", "wide", "narrow", "convolution")
        none = dict.fromkeys(names, 0)
        self.products = np.array(
            [[(row["products"] or [none])[0][name] for name in names] for row in rows], float
        ).T.reshape(len(names), len(rows))
        self.registers = np.array([[row["vector"].get(name, 0.0) for name in CLASSES] for row in rows], float)
        self.moved = np.array([row["moved"] for row in rows], float)
        self.cycles = np.array([row["cycles"] for row in rows], float)
        self.count = np.array([row["count"] for row in rows], float)

    def predicted(self, of: Constants, device: Device) -> Array:
        """Cycles under the model."""
        away = away_share(self.registers, self.moved)
        _, m, n, _, taps, *_, convolution = self.products
        vector = (convolution == 0) & (taps == 0) & (np.minimum(m, n) == 1)
        products = product_cycles(np.array([*self.products[:8], away, vector]), of, device)
        return kernel_cycles(products, self.products[7], self.registers, self.moved, of, device)

    def weights(self) -> Array:
        """Of each kernel in a fit: long and frequent ones weigh more."""
        return np.asarray(np.sqrt(np.minimum(self.count, 4)) * np.clip(self.cycles / 5000, 0.5, 4) ** 0.5)

    def sets(self) -> dict[str, Array]:
        """Name -> which kernels."""
        has, slides = self.products[0] > 0, self.products[8] > 0
        return {
            "products": has & ~slides,
            "convolutions": slides,
            "others": ~has,
            "long": self.cycles >= 10_000,
        }


def fit(table: Table, device: Device, only: Sequence[str] = ()) -> Constants:
    """Least squares of logarithms; long kernels and frequent ones weigh more.

    Args:
        only: names of constants to fit; others stay as they are in the file.
    """
    if only:
        return _fit_some(table, device, only)
    names = list(START)
    first = np.log([*START.values(), *VECTOR])
    weight = table.weights()

    def constants(of: Array) -> Constants:
        values = list(map(float, np.exp(of)))
        given = dict(zip(names, values, strict=False))
        return Constants(**given, lanes=LANES.get(device.kind, 128), vector=tuple(values[len(names) :]))

    def errors(of: Array) -> Array:
        near = np.concatenate([np.full(len(names), 0.02), np.full(len(CLASSES), 0.01)]) * (of - first)
        return np.concatenate([weight * np.log(table.predicted(constants(of), device) / table.cycles), near])

    bounds = first - 5, first + np.log(10)
    bounds[0][names.index("rate")] = 0.0
    return constants(least_squares(errors, first, bounds=bounds, loss="soft_l1", f_scale=0.15).x)


def _fit_some(table: Table, device: Device, names: Sequence[str]) -> Constants:
    """As `fit`, of some constants."""
    known = cycles.model(device.kind)
    assert known is not None, f"{device.kind} is not in {FILE.name}"
    of = known.constants
    weight = table.weights()

    def constants(logs: Array) -> Constants:
        return replace(of, **dict(zip(names, map(float, np.exp(logs)), strict=True)))

    def off(logs: Array) -> Array:
        return np.asarray(weight * np.log(table.predicted(constants(logs), device) / table.cycles))

    first = np.log([START[name] for name in names])
    return constants(least_squares(off, first, bounds=(first - 5, first + np.log(10)), loss="soft_l1", f_scale=0.15).x)


def errors(table: Table, of: Constants, device: Device) -> dict[str, dict[str, float]]:
    """Of each set: kernels, median and 90th percentile of relative errors, and the sum over the estimates' sum."""
    predicted = table.predicted(of, device)
    found = {}
    for name, chosen in table.sets().items():
        if chosen.any():
            off = np.abs(predicted[chosen] / table.cycles[chosen] - 1)
            total = (predicted * table.count)[chosen].sum() / (table.cycles * table.count)[chosen].sum()
            found[name] = {
                "kernels": int(chosen.sum()),
                "median": float(np.median(off)),
                "p90": float(np.quantile(off, 0.9)),
                "sum": float(total),
            }
    return found


def read(kind: str, held_out: bool) -> Table:
    """The kernels of a kind's nets, those held out or the others."""
    paths = [path for path in (OUT / kind).glob("*.jsonl") if (_seed(path) % HELD_OUT == 0) == held_out]
    return Table([json.loads(line) for path in sorted(paths) for line in path.read_text().splitlines() if line])


def _seed(path: Path) -> int:
    return int(re.sub(r"\D", "", path.stem))


HEAD = """\
# Cycles of a TPU's kernels by kind: `python benchmarks/fit_cycles.py --write KIND` writes this file.
#
# version  of the libtpu whose estimates these are.
# rate     passes take so many times the datasheet's FLOP; memory: share of its bandwidth; lanes: side of a matrix unit.
# Others in cycles, per kernel or per register (`Constants` in cycles.py).
# errors   on kernels of nets that were not fitted: their number, median and 90th percentile of relative errors, and the
#          sum of all over the sum of the estimates. `convolutions`: of single ones.
"""


def text(kind: str, found: Mapping[str, Any]) -> str:
    """One kind as TOML."""

    def value(of: Any) -> str:
        if isinstance(of, Mapping):
            return "{ " + ", ".join(f"{key} = {value(each)}" for key, each in of.items()) + " }"
        return f'"{of}"' if isinstance(of, str) else f"{of:.4g}" if isinstance(of, float) else str(of)

    return "\n".join([f"[{kind}]", *(f"{key} = {value(each)}" for key, each in found.items())])


def main() -> None:
    """Measure, fit or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="TARGET")
    parser.add_argument("--products", metavar="TARGET")
    parser.add_argument("--convolutions", metavar="TARGET")
    parser.add_argument("--seeds", default="0:20", help="first:last, without the last")
    parser.add_argument("--write", metavar="KIND")
    parser.add_argument("--only", metavar="NAMES", help="with --write: the constants to fit; others stay")
    parser.add_argument("--check", metavar="KIND")
    parser.add_argument("--into", metavar="SET", help="with --check: write this set's errors, leave all else")
    asked = parser.parse_args()
    seeds = range(*map(int, asked.seeds.split(":")))
    if asked.measure:
        measure(asked.measure, seeds, "net", net)
    if asked.products:
        measure(asked.products, seeds, "dot", lambda seed, _: random_products.module(seed))
    if asked.convolutions:
        measure(asked.convolutions, seeds, "conv", lambda seed, _: random_convolutions.module(seed))
    if kind := asked.write or asked.check:
        device, document = load_device(kind), tomllib.loads(FILE.read_text()) if FILE.exists() else {}
        if asked.write:
            of = fit(read(kind, False), device, asked.only.split(",") if asked.only else ())
            found = {name: value for name, value in asdict(of).items() if name != "vector"}
            found["vector"] = dict(zip(CLASSES, of.vector, strict=True))
            kept = document[kind]["errors"] if asked.only else {}  # of sets that nothing was measured of
            found |= {"version": metadata.version("libtpu"), "errors": kept | errors(read(kind, True), of, device)}
            document[kind] = found
        else:
            known = cycles.model(kind)
            assert known is not None, f"{kind} is not in {FILE.name}"
            found = {"errors": errors(read(kind, True), known.constants, device)}
            if asked.into:
                document[kind]["errors"][asked.into] = found["errors"][asked.into]
        if asked.write or asked.into:
            FILE.write_text("\n\n".join([HEAD.rstrip(), *(text(*item) for item in sorted(document.items()))]) + "\n")
        for name, error in found["errors"].items():
            print(kind, name, {key: round(each, 3) for key, each in error.items()})


if __name__ == "__main__":
    main()
