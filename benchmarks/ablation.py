"""What each rule of the compiler model is worth: memory predicted without it, beside what was compiled.

Every variant takes one pass of a target's compiler away, or one rule back to the coarse one of `Backend` and `Fusion`.
The rows are those of `compiled.py`, `developed`, `bf16.py` and `random_nets.py`, whose compiled memory is kept. A rule
stays if without it a row that was within 15 % of its compiled memory leaves that, or the 90th percentile of errors
rises by 5 points.
Programs are captured and partitioned once, into `out/ablation`; rows in `results/ablation.csv` are not made again.

    python benchmarks/ablation.py [--targets tpu,gpu,cpu] [--variants WORD,…]
"""

from __future__ import annotations

import argparse
import csv
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from compiled import annotations, mesh_on
from models import program
from results import RESULTS, made, read

from autoshard.cost import predict as predicting
from autoshard.cost.compiler.backend import Backend
from autoshard.cost.compiler.backends import BACKENDS
from autoshard.cost.compiler.cpu import CpuFusion
from autoshard.cost.compiler.gpu import backend as gpu
from autoshard.cost.compiler.gpu.backend import GpuFusion
from autoshard.cost.compiler.kernels import Fusion
from autoshard.cost.compiler.tpu import backend as tpu
from autoshard.cost.compiler.tpu import place
from autoshard.cost.compiler.tpu.fusion import TpuFusion
from autoshard.cost.machine.device import Device, load_device
from autoshard.cost.passes import Passes
from autoshard.errors import ManualPlanError
from autoshard.graph.ops import Graph
from autoshard.stablehlo.reader import build_graph

KEPT = Path("out/ablation")
WITHIN, RISE = 0.15, 0.05
"""Of compiled memory, what a row is to stay within; and how far the 90th percentile may rise."""
KINDS = {"tpu": "tpu-v5e", "gpu": "h100", "cpu": "cpu"}
FUSIONS: dict[str, type[Fusion]] = {"tpu": TpuFusion, "gpu": GpuFusion, "cpu": CpuFusion}


def first(found: Any, *_: Any, **__: Any) -> Any:
    """A function that changes nothing."""
    return found


COARSE: dict[str, list[tuple[Any, str, Any]]] = {
    "tpu": [
        (tpu, "merged_outputs", first),
        (tpu, "several_results", first),
        (tpu, "hidden", first),
        (tpu, "product_with_vectors", lambda kernel, program: None),
        (tpu, "beside_sparse_cores", lambda kernels, order, program, device: (kernels, order)),
        (TpuFusion, "_met", lambda self: set()),
        (TpuFusion, "_widens", lambda self, step: False),
        (place, "_take_over", lambda *arguments: None),
    ],
    "gpu": [
        (gpu, "merged_outputs", first),
        (gpu, "_keep_viewed", lambda kernels, program, sums: None),
        (gpu.GpuBackend, "_contiguous", staticmethod(lambda kernel, program: [kernel])),
        (gpu, "split_k", lambda product, *device: (1, product.k)),
    ],
    "cpu": [],
}
"""Where a function stands that makes one rule, its name, and what does without."""
Case = tuple[str, float, bytes]
"""Its name, compiled bytes, and its lowered program with the device, pickled."""
Patch = tuple[Any, str, Any]


def sources() -> Iterator[tuple[str, Callable[[], Graph], list[dict[str, Any]]]]:
    """Every program with its rows: a name, what builds its graph, and the rows that were compiled."""
    from bf16 import DEEP, PROGRAMS
    from random_nets import NAME, graph_of

    from autoshard import api

    rows: dict[str, list[dict[str, Any]]] = {}
    for file in ("compiled", "developed", "bf16_gpu", "bf16_tpu", "random_nets"):
        for row in read(RESULTS / f"{file}.csv"):
            if "compiled_memory" in row and not row["plan"].startswith("random"):
                rows.setdefault(row["model"], []).append(row)
    bf16 = PROGRAMS | DEEP
    for name, mine in rows.items():
        if name.startswith(NAME):
            yield name, lambda name=name: graph_of(int(name.removeprefix(NAME))), mine  # type: ignore[misc]
        elif name in bf16:
            yield name, lambda make=bf16[name]: build_graph(api.capture(**make())), mine  # type: ignore[misc]
        else:
            yield name, lambda name=name: build_graph(program(name)), mine  # type: ignore[misc]


def lowered(graph: Graph, row: Mapping[str, Any]) -> tuple[bytes, int]:
    """The program that the target's compiler gets under a row's plan, and the memory that is predicted of it."""
    mesh = mesh_on(row["target"], row["mesh"])
    kept: list[bytes] = []

    def backend(device: Device) -> Any:
        real = BACKENDS[device.target](device)

        def compile_(program: Any) -> Any:
            kept[:] = [pickle.dumps((program, device))]
            return real.compile(program)

        return mock.Mock(compile=compile_)

    with mock.patch.object(predicting, "backend_of", backend):
        found = predicting.predict(graph, annotations(row["plan"], graph, mesh), mesh)
    return kept[0], found.peak_memory_bytes


def cases(family: str) -> list[Case]:
    """The lowered programs of a target family's rows; one whose predicted memory is not the row's is another plan."""
    found = []
    for name, build, rows in sources():
        graph = None
        for row in rows:
            if load_device(row["target"].partition(":")[0]).target != family:
                continue
            title = " ".join((name, row["target"], row["plan"]))
            path = KEPT / f"{title.replace('/', ' ')}.pickle"
            if not path.exists():
                graph = graph or build()
                try:
                    content, predicted = lowered(graph, row)
                except ManualPlanError:
                    continue
                KEPT.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pickle.dumps((content, predicted)))
            content, predicted = pickle.loads(path.read_bytes())
            if abs(predicted / row["predicted_memory"] - 1) < 1e-3:
                found.append((title, row["compiled_memory"], content))
    return found


def errors(found: list[Case]) -> np.ndarray:
    """Memory predicted over memory compiled, less one, of every case."""
    values = []
    for _, compiled, content in found:
        program, device = pickle.loads(content)
        values.append(BACKENDS[device.target](device).compile(program).peak_bytes / compiled - 1)
    return np.array(values)


def variants(family: str) -> dict[str, Patch]:
    """Name -> what it changes: a pass left out, a method as the base class has it, a function that does nothing."""
    backend = BACKENDS[family]  # type: ignore[index]
    rewrites = backend.__dict__["rewrites"]
    found: dict[str, Patch] = {}
    for each in rewrites.fget(backend(load_device(KINDS[family]))):
        name = repr(Passes((each,)))

        def fewer(self: Backend, gone: str = name) -> Passes[Any]:
            return Passes(one for one in rewrites.fget(self) if repr(Passes((one,))) != gone)

        found[f"pass {name}"] = (backend, "rewrites", property(fewer))
    for owner, base in ((backend, Backend), (FUSIONS[family], Fusion)):
        for name, value in owner.__dict__.items():
            if callable(value) and name in base.__dict__ and not name.startswith("__"):
                found[f"{owner.__name__}.{name}"] = (owner, name, base.__dict__[name])
    if family == "tpu":
        found["all of libtpu.toml"] = (sys.modules[__name__], "BACKENDS", {"tpu": tpu.CoarseTpuBackend})
    for module, name, instead in COARSE[family]:
        if name in module.__dict__:
            found[name.lstrip("_")] = (module, name, instead)
    return found


def verdict(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, str]:
    """The cases that leave what they were within, and whether the rule stays."""
    leave = (abs(before) <= WITHIN) & (abs(after) > WITHIN)
    rises = np.quantile(abs(after), 0.9) - np.quantile(abs(before), 0.9) > RISE
    return leave, "stays: rows leave" if leave.any() else "stays: errors rise" if rises else "goes"


def main() -> None:
    """Make the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="tpu,gpu,cpu")
    parser.add_argument("--variants", default="", help="only those whose names have one of these words, by commas")
    parser.add_argument("--out", type=Path, default=RESULTS / "ablation.csv")
    options = parser.parse_args()
    known = set()
    if options.out.exists():
        with options.out.open(newline="") as lines:
            known = {(row["target"], row["variant"], row["sources"]) for row in csv.DictReader(lines)}
    for family in options.targets.split(","):
        wanted = {
            name: patch
            for name, patch in variants(family).items()
            if any(word in name for word in options.variants.split(","))
            and (family, name, made()["sources"]) not in known
        }
        if not wanted:
            continue
        found = cases(family)
        before = errors(found)
        for name, patch in wanted.items():
            with mock.patch.object(*patch):
                after = errors(found)
            leave, why = verdict(before, after)
            row = {
                "target": family,
                "variant": name,
                "rows": len(found),
                "p90": f"{np.quantile(abs(before), 0.9):.4f}",
                "p90_without": f"{np.quantile(abs(after), 0.9):.4f}",
                "mean": f"{abs(before).mean():.4f}",
                "mean_without": f"{abs(after).mean():.4f}",
                "leave": int(leave.sum()),
                "which": "; ".join(title for (title, *_), gone in zip(found, leave, strict=True) if gone),
                "verdict": why,
            }
            write(options.out, row | made())
            print(family, name, row["p90"], row["p90_without"], row["leave"], why, file=sys.stderr, flush=True)


def write(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row."""
    new = not path.exists()
    with path.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
