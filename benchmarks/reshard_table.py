"""Measure what each partitioner emits to change a value's sharding, and write the tables that `cost/reshard.py` reads.

    python benchmarks/reshard_table.py --target cpu --mesh 8 --mesh 2x8 … --table autoshard/cost/reshard_table.json
    python benchmarks/reshard_table.py --target gpu --mesh 2x4     (how well what is predicted holds there)

One module holds many pairs: pair k is an argument sharded as the source, an annotation with the destination under the
location `pair<k>`, and a result. The passes that merge collectives of different pairs are off. Every collective of the
compiled program is read back with the pair it belongs to, the mesh axes it runs over, and its bytes as a part of the
tensor: the axes by whose sizes the whole tensor's bytes are divided. Measure on axes whose products and quotients all
differ (2x8 and not 2x4). The table keeps the pairs that `autoshard.cost.reshard.reduced` cannot make smaller.
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
from fractions import Fraction
from pathlib import Path

from autoshard.cost.device import Target
from autoshard.cost.reshard import decode, encode, reduced, regular_steps, reshard, specs_over, whole_pair
from autoshard.mesh import Mesh, Spec, format_spec
from autoshard.verify.compile import compile_module
from autoshard.verify.hlo_text import group_axes, pair_axes, parse_hlo, replica_groups, source_target_pairs
from autoshard.verify.targets import parse_target

MERGING = (
    "all-gather-combiner,all-reduce-combiner,reduce-scatter-combiner,collective-permute-combiner,all-to-all-combiner,"
    "cpu-all-gather-combiner,gpu-all-gather-combiner,convert-async-collectives-to-sync"
)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
TARGETS = {  # what to compile a mesh of so many devices for
    "cpu": {n: f"cpu:{n}" for n in (2, 4, 6, 8, 12, 16, 24, 32, 64)},
    "tpu": {4: "tpu-v5e:2x2", 8: "tpu-v5e:2x4", 16: "tpu-v5e:4x4", 64: "tpu-v5e:8x8"},
    "gpu": {4: "h100:4", 6: "h100:6", 8: "h100:8", 16: "h100:2x8", 24: "h100:3x8", 64: "h100:8x8"},
}


DIMS = {1: 48 * 4096, 2: 48 * 32, 3: 48 * 3, 4: 48}
"""Size of every dim by rank: divisible by the meshes, and beyond the sizes that a TPU treats in its own way."""


Shapes = Mapping[int, tuple[int, ...]]
"""Rank -> shape of the measured tensors."""


@dataclass(frozen=True)
class Found:
    """One collective: kind, axes (as `verify/hlo_text.py` names them), bytes per device as XLA prints it."""

    kind: str
    axes: tuple[str, ...]
    bytes: int


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
    every = specs_over(rank, mesh.axis_names)
    pairs = [(src, dst) for src in every for dst in every if src != dst]
    return [pair for pair in pairs if rank <= 3 or all(before or after for before, after in zip(*pair, strict=True))]


def measure(
    target: str, mesh: Mesh, pairs: Sequence[tuple[Spec, Spec]], shapes: Shapes, timeout: float, chunk: int
) -> Iterator[tuple[tuple[Spec, Spec], list[Found]]]:
    """Compile `pairs` for a target on tensors of `shapes[rank]`, a chunk at a time."""
    for start in range(0, len(pairs), chunk):
        part = pairs[start : start + chunk]
        module = module_of(part, [shapes[len(src)] for src, _ in part], mesh)
        compiled = compile_module(module.encode(), TARGETS[target][mesh.size], timeout=timeout)
        print(f"{target} {mesh.shape}: {len(part)} pairs in {compiled.seconds:.1f} s", file=sys.stderr, flush=True)
        yield from zip(part, read(compiled.hlo_text, mesh, len(part)), strict=True)


def formula(number: Fraction, sizes: Sequence[int], quotients_first: bool = False) -> str:
    """`number` as a product of axis sizes, maybe over another: `01`, `00`, `1:0`, or nothing for one.

    Where several fit, products come before quotients, or the other way round. (Measured on 2x4 as well as on 2x8: a
    part of an axis is a quotient, `1[1:0]`, and what is gathered over it a product, `/00`.) SystemExit where none fits.
    """
    positions = range(len(sizes))
    products = [axes for r in range(3) for axes in itertools.combinations_with_replacement(positions, r)]
    products += [axes for r in range(3, len(sizes) + 1) for axes in itertools.combinations(positions, r)]
    ways = [(over, ()) for over in products if len(over) < 2 or len(set(over)) == len(over)]
    quotients = [(over, under) for over in positions for under in positions if over != under]
    rest = [((over,), (under,)) for over, under in quotients], [(over, ()) for over in products]
    for over, under in [*ways, *(rest[0] if quotients_first else []), *rest[1], *rest[0]]:
        if number == Fraction(product(over, sizes), product(under, sizes)):
            return "".join(map(str, over)) + (f":{''.join(map(str, under))}" if under else "")
    raise SystemExit(f"{number} is no product or quotient of the axis sizes {sizes}")


def product(axes: Sequence[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def row_of(found: Sequence[Found], total: int, mesh: Mesh) -> str:
    """The row of a pair, as `autoshard.cost.reshard.decode` reads it, for a tensor of `total` bytes."""
    steps = []
    for each in found:
        named = []
        for axis in each.axes:
            name, _, part = axis.partition("[")
            if "~" in name:
                raise SystemExit(f"{each} runs over groups that follow no axis")
            devices = Fraction(int(part.split("/")[0])) if part else None
            named.append(f"{mesh.axis_names.index(name)}{f'[{formula(devices, mesh.shape, True)}]' if devices else ''}")
        steps.append(f"{each.kind} {''.join(named)}/{formula(Fraction(total, each.bytes), mesh.shape)}")
    return ", ".join(steps)


Rows = dict[tuple[Spec, Spec], str]


def irreducible(rows: Rows, mesh: Mesh) -> dict[str, str]:
    """The rows to keep: of pairs in which every axis and dim plays a part. Says which others do not follow."""
    kept: dict[str, str] = {}
    for (src, dst), row in rows.items():
        small = reduced(src, dst, mesh)
        if small.axes == mesh.axis_names and small.kept == 1 and len(small.src) == len(src):
            kept[encode(small.src, small.dst)] = row
    against = 0
    for (src, dst), row in rows.items():
        small = reduced(src, dst, mesh)
        if small.axes == mesh.axis_names:
            follows = decode(kept[encode(small.src, small.dst)], mesh.shape)
            shares = [(kind, axes, share / small.kept) for kind, axes, share in follows]
            if shares != list(decode(row, mesh.shape)):
                against += 1
                print(f"  against its reduced pair: {format_spec(src)} -> {format_spec(dst)}: {row}", file=sys.stderr)
    print(f"{mesh.shape}: {len(rows)} pairs, {len(kept)} rows, {against} against the reduction", file=sys.stderr)
    return kept


def exceptions(rows: Rows, mesh: Mesh, target: Target) -> dict[str, str]:
    """The rows of a mesh of three axes that do not follow from pairs over fewer."""
    kept: dict[str, str] = {}
    for (src, dst), row in rows.items():
        follows = [(step.kind, step.axes, step.share) for step in regular_steps(src, dst, mesh, target)]
        found = [
            (kind, tuple(mesh.axis_names[i] + part for i, part in axes), share)
            for kind, axes, share in decode(row, mesh.shape)
        ]
        if follows != found:
            kept[encode(*whole_pair(src, dst, mesh.axis_names))] = row
    print(f"{mesh.shape}: {len(rows)} pairs, {len(kept)} do not follow", file=sys.stderr)
    return kept


def update(path: Path, target: str, mesh: str, rows: Mapping[str, str], versions: Mapping[str, str]) -> None:
    """Put the rows of one target and mesh into the table; what all targets share is kept once."""
    table = json.loads(path.read_text()) if path.exists() else {"versions": {}, "rows": {}}
    old: dict[str, dict[str, dict[str, str]]] = table["rows"]
    every = {name: {m: dict(r) for m, r in old.get("common", {}).items()} for name in TARGETS}
    for name in TARGETS:
        for m, r in old.get(name, {}).items():
            every[name].setdefault(m, {}).update(r)
    every[target][mesh] = dict(rows)
    table["versions"][target] = dict(sorted(versions.items()))
    new: dict[str, dict[str, dict[str, str]]] = {name: {} for name in ("common", *sorted(TARGETS))}
    for m in sorted({m for by_mesh in every.values() for m in by_mesh}):
        for pair in sorted({pair for by_mesh in every.values() for pair in by_mesh.get(m, {})}):
            values = {name: every[name].get(m, {}).get(pair) for name in every}
            if len(set(values.values())) == 1:
                new["common"].setdefault(m, {})[pair] = values[target] or ""
            else:
                for name, row in values.items():
                    if row is not None:
                        new[name].setdefault(m, {})[pair] = row
    table["rows"] = {name: by_mesh for name, by_mesh in new.items() if by_mesh}
    path.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    parser.add_argument("--mesh", action="append", required=True, help="2x8; may be given several times")
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--every", type=int, default=1, help="take each n-th pair only")
    parser.add_argument("--scale", type=int, default=1, help="multiply every dim, to see that nothing depends on it")
    parser.add_argument("--add", default="0", help="1 or 1,0,0: add to each dim, to see what becomes of uneven splits")
    parser.add_argument("--chunk", type=int, default=200, help="pairs per module")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one module")
    parser.add_argument("--table", type=Path, help="the table to update; by default rows are only compared with it")
    args = parser.parse_args()
    flags = f"--xla_disable_hlo_passes={MERGING}"
    if args.target != "tpu":  # libtpu does not know the flag, and merges nothing across these pairs
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    extra = [int(number) for number in args.add.split(",")]
    extra = extra * 4 if len(extra) == 1 else [*extra, 0, 0, 0]
    shapes = {rank: tuple(args.scale * dim + extra[i] for i in range(rank)) for rank, dim in DIMS.items()}
    for text in args.mesh:
        shape = tuple(int(size) for size in text.split("x"))
        mesh = Mesh(shape, tuple("xyz"[: len(shape)]))
        pairs = [pair for rank in map(int, args.ranks.split(",")) for pair in pairs_of(rank, mesh)][:: args.every]
        measured = dict(measure(args.target, mesh, pairs, shapes, args.timeout, args.chunk))
        if args.table:
            rows = {pair: row_of(each, 4 * math.prod(shapes[len(pair[0])]), mesh) for pair, each in measured.items()}
            keep = irreducible(rows, mesh) if len(shape) < 3 else exceptions(rows, mesh, args.target)
            versions = parse_target(TARGETS[args.target][mesh.size]).packages()
            update(args.table, args.target, text, keep, versions)
        else:
            compare(measured, shapes, mesh, args.target)


def compare(measured: Mapping[tuple[Spec, Spec], list[Found]], shapes: Shapes, mesh: Mesh, target: Target) -> None:
    """Say where `cost.reshard` predicts something else than was measured."""
    wrong = 0
    over = [0, 0]  # bytes predicted, bytes measured
    for (src, dst), found in measured.items():
        predicted = reshard(shapes[len(src)], 4, src, dst, mesh, target)
        over[0] += sum(each.bytes for each in predicted)
        over[1] += sum(each.bytes for each in found)
        if sorted((p.kind, p.axes, p.bytes) for p in predicted) != sorted((f.kind, f.axes, f.bytes) for f in found):
            wrong += 1
            say = [f"{each.kind} {'+'.join(each.axes)} {each.bytes}" for each in found]
            but = [f"{each.kind} {'+'.join(each.axes)} {each.bytes}" for each in predicted]
            print(f"{format_spec(src)} -> {format_spec(dst)}: {'; '.join(say)} but predicted {'; '.join(but)}")
    print(
        f"{target} {mesh.shape}: {wrong} of {len(measured)} pairs differ; "
        f"bytes predicted / measured {over[0] / over[1]:.4f}"
    )


if __name__ == "__main__":
    main()
