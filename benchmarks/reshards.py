"""What each compiler's partitioner emits to change a value's sharding, held against `reshard/price.py`.

    python benchmarks/reshards.py --target cpu --mesh 2x4 --mesh 2x2x2 --out out/reshards.jsonl
    python benchmarks/reshards.py --target tpu --mesh 2x4 --uneven --out out/reshards.jsonl
    python benchmarks/reshards.py --tables --out out/reshards.jsonl

Every pair of shardings over the mesh's axes and up to four dims is compiled, up to the order of dims (each pair
with its dims in one order, drawn by chance); dims that neither side splits are left out. One module holds many pairs:
pair k is an argument sharded as the source, an annotation with the destination under the location `pair<k>`, and a
result. The passes that merge collectives of different pairs are off. What is found is written down, pair by pair, so a
run that was stopped goes on where it was; `--tables` compares all that was found with what is predicted now.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from autoshard.cost.machine.device import Target
from autoshard.cost.partitioner.reshard.price import reshard, specs_over
from autoshard.mesh import Mesh, Spec, format_spec, parse_spec
from autoshard.verify.compile import compile_module
from autoshard.verify.hlo_text import group_axes, pair_axes, parse_hlo, replica_groups, source_target_pairs

MERGING = (
    "all-gather-combiner,all-reduce-combiner,reduce-scatter-combiner,collective-permute-combiner,all-to-all-combiner,"
    "cpu-all-gather-combiner,gpu-all-gather-combiner,convert-async-collectives-to-sync"
)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
TPUS = {4: "tpu-v5e:2x2", 8: "tpu-v5e:2x4", 16: "tpu-v5e:4x4", 32: "tpu-v5e:4x8", 64: "tpu-v5e:8x8"}
SIZES = {1: 48 * 4096, 2: 48 * 32, 3: 48 * 3, 4: 48}
"""Size of every dim by rank: beyond what a TPU treats in its own way; made divisible by the devices."""

Pair = tuple[Spec, Spec]
Step = tuple[str, tuple[str, ...], int]
"""Kind, axes (as `verify/hlo_text.py` names them), bytes per device as XLA prints them."""


def compiler(target: Target, devices: int) -> str:
    """What to compile for, as `verify` takes it."""
    if target == "tpu":
        return TPUS[devices]
    return f"cpu:{devices}" if target == "cpu" else f"h100:{devices}" if devices <= 8 else f"h100:{devices // 8}x8"


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
                f"%{name}{k} = stablehlo.custom_call @Sharding({source}) "
                f'{{mhlo.sharding = "{attributes}"}} : ({kind}) -> {kind} loc("{place}{k}")'
            )
        names.append(f"%end{k}")
    lines = "\n    ".join(body)
    return (
        f"module @m attributes {{mhlo.num_partitions = {mesh.size} : i32, mhlo.num_replicas = 1 : i32}} {{\n"
        f"  func.func public @main({', '.join(arguments)}) -> ({', '.join(results)}) {{\n    {lines}\n"
        f"    return {', '.join(names)} : {', '.join(types)}\n  }}\n}}\n"
    )


def read(text: str, mesh: Mesh, count: int) -> list[list[Step]]:
    """Per pair its collectives, in program order."""
    found: list[list[Step]] = [[] for _ in range(count)]
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
            found[int(labels.pop())].append((kind, axes, payload))
    return found


def pairs_of(mesh: Mesh, rank: int, seed: int = 0) -> list[Pair]:
    """Every pair of different specs in which every dim plays a part, each with its dims in one order."""
    rng = random.Random(seed)
    every = specs_over(rank, mesh.axis_names)
    found: dict[tuple[Any, ...], Pair] = {}
    for src in every:
        for dst in every:
            dims = list(zip(src, dst, strict=True))
            if src != dst and all(before or after for before, after in dims) and tuple(sorted(dims)) not in found:
                key = tuple(sorted(dims))
                rng.shuffle(dims)
                found[key] = tuple(before for before, _ in dims), tuple(after for _, after in dims)
    return list(found.values())


def shape_of(rank: int, mesh: Mesh, uneven: bool) -> tuple[int, ...]:
    """Of the tensors to compile: every dim divided by the devices, or none of the first and third."""
    size = -(-SIZES[rank] // mesh.size) * mesh.size
    return tuple(size + (0 if not uneven or dim % 2 else dim + 1) for dim in range(rank))


def measure(
    target: Target, mesh: Mesh, pairs: Sequence[Pair], shape: tuple[int, ...], chunk: int = 100
) -> Iterator[tuple[Pair, list[Step]]]:
    """Compile `pairs` on tensors of `shape`, a chunk at a time."""
    for start in range(0, len(pairs), chunk):
        part = pairs[start : start + chunk]
        module = module_of(part, [shape] * len(part), mesh)
        compiled = compile_module(module.encode(), compiler(target, mesh.size), timeout=1800)
        print(f"{target} {mesh.shape}: {len(part)} pairs in {compiled.seconds:.1f} s", file=sys.stderr, flush=True)
        yield from zip(part, read(compiled.hlo_text, mesh, len(part)), strict=True)


def without_merging() -> None:
    """Keep the collectives of different pairs apart (libtpu does not know the flag, and merges none of them)."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_disable_hlo_passes={MERGING}".strip()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=get_args(Target))
    parser.add_argument("--mesh", action="append", default=[], help="2x4; may be given several times")
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--uneven", action="store_true", help="dims that the axes do not divide")
    parser.add_argument("--most", type=int, default=10**6, help="pairs per mesh and rank, drawn by chance")
    parser.add_argument("--chunk", type=int, default=100, help="pairs per module")
    parser.add_argument("--out", type=Path, default=Path("out/reshards.jsonl"))
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if args.tables:
        tables(args.out)
        return
    if args.target != "tpu":
        without_merging()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = {key(row) for row in rows(args.out)}
    for text in args.mesh:
        sizes = tuple(map(int, text.split("x")))
        mesh = Mesh(sizes, ("x", "y", "z")[: len(sizes)])
        for rank in map(int, args.ranks.split(",")):
            shape = shape_of(rank, mesh, args.uneven)
            pairs = pairs_of(mesh, rank)
            pairs = random.Random(1).sample(pairs, min(args.most, len(pairs)))
            made = [row(args.target, mesh, shape, pair, []) for pair in pairs]
            left = [pair for pair, each in zip(pairs, made, strict=True) if key(each) not in known]
            for pair, found in measure(args.target, mesh, left, shape, args.chunk):
                with args.out.open("a") as file:
                    file.write(json.dumps(row(args.target, mesh, shape, pair, found)) + "\n")


Row = dict[str, Any]


def row(target: str, mesh: Mesh, shape: Sequence[int], pair: Pair, found: Sequence[Step]) -> Row:
    """What one pair compiled to, as a line of the file."""
    src, dst = map(format_spec, pair)
    return {"target": target, "mesh": mesh.shape, "shape": list(shape), "src": src, "dst": dst, "found": found}


def key(each: Row) -> tuple[Any, ...]:
    """What a row is about."""
    return each["target"], tuple(each["mesh"]), tuple(each["shape"]), each["src"], each["dst"]


def rows(path: Path) -> list[Row]:
    """Every row of the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(path: Path) -> None:
    """Per target, mesh and rank: pairs, how many are exact, the bytes that differ; the first pairs that do."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for each in rows(path):
        mesh = Mesh(tuple(each["mesh"]), ("x", "y", "z")[: len(each["mesh"])])
        even = all(size % mesh.size == 0 for size in each["shape"])
        groups.setdefault((each["target"], mesh, len(each["shape"]), even), []).append(each)
    wrong = []
    print("| target | mesh | dims | split | pairs | exact | bytes that differ |\n|---|---|---|---|---|---|---|")
    for (target, mesh, rank, even), members in sorted(groups.items(), key=lambda each: str(each[0])):
        exact, off, whole = 0, 0, 0
        for each in members:
            src, dst = parse_spec(each["src"]), parse_spec(each["dst"])
            found = Counter[tuple[str, tuple[str, ...]]]()
            for kind, axes, size in each["found"]:
                found[kind, tuple(axes)] += size
            predicted = Counter[tuple[str, tuple[str, ...]]]()
            for step in reshard(each["shape"], 4, src, dst, mesh, target):
                predicted[step.kind, step.axes] += step.bytes
            if found == predicted:
                exact += 1
            else:
                pair = f"{target} {mesh.shape} {each['shape']} {each['src']} -> {each['dst']}"
                wrong.append(f"{pair}: {dict(found)} but predicted {dict(predicted)}")
            off += sum(abs(found[name] - predicted[name]) for name in {*found, *predicted})
            whole += sum(found.values())
        name = "x".join(map(str, mesh.shape))
        print(
            f"| {target} | {name} | {rank} | {'even' if even else 'uneven'} | {len(members)} "
            f"| {exact / len(members):.1%} | {off / max(whole, 1):.2%} |"
        )
    print("\n".join(wrong[:20]))


if __name__ == "__main__":
    main()
