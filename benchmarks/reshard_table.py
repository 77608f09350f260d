"""Measure what each partitioner emits to change a value's sharding, and write the tables that `cost/reshard.py` reads.

    python benchmarks/reshard_table.py --target cpu --mesh 2x4 [--mesh 4x2 …] [--ranks 1,2,3] [-o table.json]

One module holds many pairs: pair k is an argument sharded as the source, an annotation with the destination under the
location `pair<k>`, and a result. The passes that merge collectives of different pairs are off. Every collective of the
compiled program is read back with the pair it belongs to, the mesh axes it runs over, and its bytes as a part of the
tensor: the axes by whose sizes the whole tensor's bytes are divided. That is why the meshes' axes have sizes whose
products all differ: 2x4, 4x2, 2x3x4.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.cost.reshard import encode_axes, encode_pair, inert_dims_dropped
from autoshard.mesh import Mesh, Spec
from autoshard.verify.compile import compile_module
from autoshard.verify.hlo_text import group_axes, pair_axes, parse_hlo, replica_groups, source_target_pairs

MERGING = (
    "all-gather-combiner,all-reduce-combiner,reduce-scatter-combiner,collective-permute-combiner,all-to-all-combiner,"
    "cpu-all-gather-combiner,gpu-all-gather-combiner,convert-async-collectives-to-sync"
)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
TARGETS = {  # what to compile a mesh of so many devices for
    "cpu": {n: f"cpu:{n}" for n in (2, 4, 8, 16, 24, 32, 64)},
    "tpu": {4: "tpu-v5e:2x2", 8: "tpu-v5e:2x4", 16: "tpu-v5e:4x4", 64: "tpu-v5e:8x8"},
    "gpu": {4: "h100:4", 8: "h100:8", 16: "h100:2x8", 24: "h100:3x8", 64: "h100:8x8"},
}


DIMS = {1: 48 * 4096, 2: 48 * 32, 3: 48 * 3, 4: 48}
"""Size of every dim by rank: divisible by the meshes, and beyond the sizes that a TPU treats in its own way."""


@dataclass(frozen=True)
class Found:
    """One collective: kind, axes (as `verify/hlo_text.py` names them), bytes per device as XLA prints it."""

    kind: str
    axes: tuple[str, ...]
    bytes: int


def specs(rank: int, axes: Sequence[str]) -> Iterator[Spec]:
    """Every spec of a tensor of `rank` dims over some of `axes`, minor-to-major orders included."""
    for places in itertools.product(range(-1, rank), repeat=len(axes)):
        per_dim = [[axis for axis, place in zip(axes, places, strict=True) if place == dim] for dim in range(rank)]
        for orders in itertools.product(*(list(itertools.permutations(axes_of)) for axes_of in per_dim)):
            yield tuple(orders)


def annotation(spec: Spec, mesh: Mesh) -> str:
    """The GSPMD text of a spec."""
    order = [axis for dim in spec for axis in dim]
    rest = [axis for axis in mesh.axis_names if axis not in order]
    if not order:
        return "{replicated}"
    tiles = [mesh.ways(dim) for dim in spec] + ([mesh.ways(rest)] if rest else [])
    permutation = [mesh.axis_names.index(axis) for axis in order + rest]
    dims = ",".join(map(str, mesh.shape))
    turn = "" if permutation == sorted(permutation) else f"T({','.join(map(str, permutation))})"
    iota = f"<=[{dims}]{turn}" if turn else f"<=[{mesh.size}]"
    return f"{{devices=[{','.join(map(str, tiles))}]{iota}{' last_tile_dim_replicate' if rest else ''}}}"


def module_of(pairs: Sequence[tuple[Spec, Spec]], shapes: Sequence[tuple[int, ...]], mesh: Mesh) -> str:
    """StableHLO text that reshards one argument per pair."""
    arguments, types, results, body, names = [], [], [], [], []
    for k, ((src, dst), shape) in enumerate(zip(pairs, shapes, strict=True)):
        kind = f"tensor<{'x'.join(map(str, shape))}xf32>"
        arguments.append(f'%a{k}: {kind} {{mhlo.sharding = "{annotation(src, mesh)}"}}')
        types.append(kind)
        results.append(f'{kind} {{mhlo.sharding = "{annotation(dst, mesh)}"}}')
        # The negations keep the pair away from the module's arguments and results, as inside a real program.
        for line, (name, attributes) in enumerate(
            (("src", annotation(src, mesh)), ("dst", annotation(dst, mesh)), ("end", annotation(dst, mesh)))
        ):
            source = f"%a{k}" if line == 0 else f"%{'src' if line == 1 else 'dst'}{k}"
            if line != 1:
                body.append(f'%n{line}_{k} = stablehlo.negate {source} : {kind} loc("edge{k}")')
                source = f"%n{line}_{k}"
            place = "pair" if line == 1 else "edge"
            body.append(
                f'%{name}{k} = stablehlo.custom_call @Sharding({source}) '
                f'{{mhlo.sharding = "{attributes}"}} : ({kind}) -> {kind} loc("{place}{k}")'
            )
        names.append(f"%end{k}")
    lines = "\n    ".join(body)
    return (
        f"module @m attributes {{mhlo.num_partitions = {mesh.size} : i32, mhlo.num_replicas = 1 : i32}} {{\n"
        f"  func.func public @main({', '.join(arguments)}) -> ({', '.join(results)}) {{\n    {lines}\n"
        f"    return {', '.join(names)} : {', '.join(types)}\n  }}\n}}\n"
    )


# --- reading the compiled program back ---------------------------------------------------------------------------

def read(text: str, mesh: Mesh, count: int) -> list[list[Found]]:
    """Per pair its collectives, in program order."""
    found: list[list[Found]] = [[] for _ in range(count)]
    seen: set[int] = set()
    for computation in parse_hlo(text).computations.values():
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or instruction.channel in seen:
                continue
            if instruction.channel is not None:
                seen.add(instruction.channel)
            # TPU may move a permute over its neighbours: it belongs to the pair all the same.
            labels = set(re.findall(r"(?:pair|edge)(\d+)", instruction.op_name))
            if len(labels) != 1:
                raise SystemExit(f"a collective does not belong to one pair: {instruction}")
            operands = [computation.instructions[name] for name in instruction.operands]
            payload = sum(operand.bytes for operand in operands)
            if kind == "collective-permute":
                axes = pair_axes(source_target_pairs(instruction.rest), mesh)
            else:
                groups = replica_groups(instruction.rest, mesh.size)
                axes = group_axes(groups, mesh)
                payload *= len(groups[0]) if kind == "all-gather" else 1
            found[int(labels.pop())].append(Found(kind, axes, payload))
    return found


# --- the experiment ----------------------------------------------------------------------------------------------


def pairs_of(rank: int, mesh: Mesh) -> list[tuple[Spec, Spec]]:
    """Every pair of different specs; beyond rank 3 only those in which every dim plays a part."""
    every = list(specs(rank, mesh.axis_names))
    pairs = [(src, dst) for src in every for dst in every if src != dst]
    return [pair for pair in pairs if rank <= 3 or len(inert_dims_dropped(*pair)[0]) == rank]


def measure(
    target: str, mesh: Mesh, pairs: Sequence[tuple[Spec, Spec]], dims: Mapping[int, int], timeout: float, chunk: int
) -> Iterator[tuple[tuple[Spec, Spec], list[Found]]]:
    """Compile `pairs` for a target on tensors of `dims[rank]` along every dim, a chunk at a time."""
    for start in range(0, len(pairs), chunk):
        part = pairs[start : start + chunk]
        shapes = [(dims[len(src)],) * len(src) for src, _ in part]
        compiled = compile_module(module_of(part, shapes, mesh).encode(), TARGETS[target][mesh.size], timeout=timeout)
        print(f"{target} {mesh.shape}: {len(part)} pairs in {compiled.seconds:.1f} s", file=sys.stderr, flush=True)
        yield from zip(part, read(compiled.hlo_text, mesh, len(part)), strict=True)


def parts(found: Found, total: int, mesh: Mesh) -> str:
    """`all-gather 01/1`: kind, axes, and the axes whose sizes divide the tensor's bytes."""
    for r in range(len(mesh.shape) + 1):
        for axes in itertools.combinations(range(len(mesh.shape)), r):
            if found.bytes * math.prod(mesh.shape[axis] for axis in axes) == total:
                return f"{found.kind} {encode_axes(found.axes, mesh)}/{''.join(map(str, axes))}"
    return f"{found.kind} {encode_axes(found.axes, mesh)}/*{found.bytes / total:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    parser.add_argument("--mesh", action="append", required=True, help="2x4; may be given several times")
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--scale", type=int, default=1, help="multiply every dim, to see that nothing depends on it")
    parser.add_argument("--chunk", type=int, default=1000, help="pairs per module")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("-o", "--output", type=Path, help="JSON to update with the measured rows")
    args = parser.parse_args()
    flags = f"--xla_disable_hlo_passes={MERGING}"
    name = "AUTOSHARD_NO_FLAGS" if args.target == "tpu" else "XLA_FLAGS"
    os.environ[name] = f"{os.environ.get(name, '')} {flags}".strip()
    dims = {rank: args.scale * dim for rank, dim in DIMS.items()}
    table: dict[str, dict[str, str]] = {}
    if args.output and args.output.exists():
        table = json.loads(args.output.read_text())
    for text in args.mesh:
        shape = tuple(int(size) for size in text.split("x"))
        mesh = Mesh(shape, tuple("xyz"[: len(shape)]))
        pairs = [pair for rank in map(int, args.ranks.split(",")) for pair in pairs_of(rank, mesh)]
        rows: dict[str, str] = {}
        for (src, dst), found in measure(args.target, mesh, pairs, dims, args.timeout, args.chunk):
            total = 4 * dims[len(src)] ** len(src)
            rows[encode_pair(src, dst, mesh)] = ", ".join(parts(each, total, mesh) for each in found)
        table.setdefault(text, {}).update(rows)
        if args.output:
            args.output.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
    if not args.output:
        print(json.dumps(table, indent=0, sort_keys=True))


if __name__ == "__main__":
    main()
