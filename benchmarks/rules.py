"""Hold every sharding rule against the compilers, over random shapes, meshes and strategies.

    python benchmarks/rules.py --target cpu --seeds 0:40 --run --rows out/rules.jsonl
    python benchmarks/rules.py --target h100:8 --rules dot_general,reduce --seeds 0:40 --rows out/rules.jsonl
    python benchmarks/rules.py --rows out/rules.jsonl              (the tables of what was run)
    python benchmarks/rules.py --rows out/rules.jsonl --markdown   (the table of docs/rules.md)
    python benchmarks/rules.py --show dot_general:12 --target cpu  (one case by itself)

Each case is one line of the rows' file, and is not run again while it stands there; with `--run` (CPU) its numbers are
compared too. Cases of one mesh share programs. See `tests/rules/harness.py` for what a case is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoshard.graph.groups import ELEMENTWISE
from autoshard.verify.compile import CompileError
from tests.rules.harness import BUILDERS, DEVICES, TORCH, Case, Row, batch_of, check, run


def main() -> None:
    """Run what is asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(DEVICES))
    parser.add_argument("--rules", default="all", help="names by commas; all; or torch, for what PyTorch writes")
    parser.add_argument("--seeds", default="0:4", help="first:limit")
    parser.add_argument("--rows", type=Path, help="jsonl that results are added to")
    parser.add_argument("--batch", type=int, default=48, help="cases of one program")
    parser.add_argument("--run", action="store_true", help="run on virtual CPU devices too, and compare the numbers")
    parser.add_argument("--show", help="one case, RULE:SEED")
    parser.add_argument("--wrong", action="store_true", help="print every case that disagrees")
    parser.add_argument("--markdown", action="store_true", help="one table over all targets, by families")
    options = parser.parse_args()
    if options.show:
        rule, _, seed = options.show.partition(":")
        show(Case(rule, int(seed)), options.target or "cpu")
        return
    known = (
        [json.loads(line) for line in options.rows.read_text().splitlines()]
        if options.rows and options.rows.exists()
        else []
    )
    if options.target and not options.rows:
        parser.error("--target needs --rows, or --show")
    if options.target:
        done = {(row["rule"], row["seed"]) for row in known if row["target"] == options.target}
        first, _, limit = options.seeds.partition(":")
        cases = [
            Case(rule, seed)
            for rule in named(options.rules)
            for seed in range(int(first), int(limit))
            if (rule, seed) not in done
        ]
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        with options.rows.open("a") as out:
            for rows in sweep(cases, options.target, options.batch, options.run):
                for row in rows:
                    known.append(as_dict(row, options.target))
                    out.write(json.dumps(known[-1]) + "\n")
                out.flush()
    if options.markdown:
        print(markdown(known))
        return
    for target in DEVICES:
        report([row for row in known if row["target"] == target], target, options.wrong)


def named(rules: str) -> list[str]:
    """The rules that `--rules` names."""
    if rules == "all":
        return sorted(BUILDERS)
    if rules == "torch":
        from tests.rules.torch_forms import FUNCTIONS

        return [f"{TORCH}{name}{suffix}" for name in sorted(FUNCTIONS) for suffix in ("", ".backward")]
    return rules.split(",")


def show(case: Case, target: str) -> None:
    """One case by itself: its program, its annotations and what became of it."""
    batch = batch_of([case], DEVICES[target], scale(target))
    if not case.rule.startswith(TORCH):
        print(batch.program.stablehlo.decode())
    for value, spec in batch.annotations.pins.items():
        print(f"pin {value}: {spec}")
    for (value, aten), spec in batch.annotations.copies.items():
        print(f"copy of {value} for op {aten}: {spec}")
    (row,) = rows = check(batch, target)
    if target == "cpu":
        run(batch, rows)
    print(row)


def scale(target: str) -> int:
    """TPU and GPU treat tiny tensors in their own ways."""
    return 1 if target == "cpu" else 4


def sweep(cases: Sequence[Case], target: str, size: int, execute: bool) -> Iterator[list[Row]]:
    """The rows of each program, cases of one mesh together."""
    meshes: dict[tuple[int, ...], list[Case]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: (case.seed, case.rule)):
        meshes[case.mesh_shape].append(case)
    for mesh, mine in meshes.items():
        for start in range(0, len(mine), size):
            before = time.perf_counter()
            rows = compiled(mine[start : start + size], target, execute)
            wrong = sum(not row.agrees for row in rows)
            spent = time.perf_counter() - before
            print(f"{target} {'x'.join(map(str, mesh))}: {len(rows)} cases, {wrong} wrong, {spent:.0f} s", flush=True)
            yield rows


def compiled(cases: Sequence[Case], target: str, execute: bool) -> list[Row]:
    """The rows of these cases; a program that is refused is halved until the case is found."""
    try:
        batch = batch_of(cases, DEVICES[target], scale(target))
        rows = check(batch, target)
        if execute:
            run(batch, rows)
        return rows
    except (CompileError, RuntimeError) as error:
        if len(cases) == 1:
            return [Row(cases[0], error=str(error)[:500])]
        half = len(cases) // 2
        return compiled(cases[:half], target, execute) + compiled(cases[half:], target, execute)


def as_dict(row: Row, target: str) -> dict[str, Any]:
    """A row of the file."""
    return {
        "target": target,
        "rule": row.case.rule,
        "seed": row.case.seed,
        "mesh": "x".join(map(str, row.case.mesh_shape)),
        "strategy": row.strategy,
        "counted": row.counted,
        "predicted": row.predicted,
        "compiled": row.compiled,
        "numbers": row.numbers,
        "equal": row.equal,
        "error": row.error,
    }


def difference(said: dict[str, int], found: dict[str, int]) -> int:
    """Bytes said and not found, or found and not said."""
    return sum(abs(said.get(key, 0) - found.get(key, 0)) for key in {*said, *found})


def family(rule: str) -> str:
    """The line of the table that a rule is counted in."""
    if rule.startswith(TORCH):
        return "PyTorch, backward" if rule.endswith(".backward") else "PyTorch, forward"
    return "elementwise" if rule in ELEMENTWISE else rule


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Per family and target: cases, how many were mispredicted, how many strategies miscounted, bytes wrong."""
    targets = [target for target in DEVICES if any(row["target"] == target for row in rows)]
    families = sorted({family(row["rule"]) for row in rows}, key=lambda name: (name.startswith("PyTorch"), name))
    table = []
    for name in [*families, "all"]:
        line: list[Any] = [name]
        for target in targets:
            mine = [row for row in rows if row["target"] == target and name in (family(row["rule"]), "all")]
            off = [difference(row["predicted"], row["compiled"]) for row in mine]
            counted = [row for row in mine if row["counted"] is not None]
            miscounted = sum(row["counted"] != row["compiled"] for row in counted)
            moved = sum(sum(row["compiled"].values()) for row in mine)
            part = f"{sum(off) / moved:.1%}" if moved else "0" if not sum(off) else f"{sum(off)} B"
            refused = sum(bool(row["error"]) for row in mine)
            line += [
                f"{len(mine)}" + (f" ({refused} refused)" if refused else ""),
                sum(map(bool, off)),
                f"{miscounted} of {len(counted)}",
                part,
            ]
        table.append(line)
    headers = ["rule", *(f"{t}: {what}" for t in targets for what in ("cases", "mispredicted", "miscounted", "bytes"))]
    return tabulate(table, headers, tablefmt="github", disable_numparse=True)


def report(rows: Sequence[dict[str, Any]], target: str, wrong: bool) -> None:
    """One line per rule."""
    if not rows:
        return
    table: list[list[Any]] = []
    by_rule: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_rule[row["rule"]].append(row)
    for name, mine in [*sorted(by_rule.items()), ("all", list(rows))]:
        off = [difference(row["predicted"], row["compiled"]) for row in mine]
        counted = [row for row in mine if row["counted"] is not None]
        miscounted = [difference(row["counted"], row["compiled"]) for row in counted]
        moved = sum(sum(row["compiled"].values()) for row in mine)
        table.append(
            [
                name,
                len(mine),
                sum(1 for size in off if size),
                f"{sum(off) / moved:.1%}" if moved else ("0" if not sum(off) else f"{sum(off)} B"),
                len(counted),
                sum(1 for size in miscounted if size),
                sum(row["numbers"] is not None for row in mine),
                sum(not row["equal"] for row in mine),
                sum(bool(row["error"]) for row in mine),
            ]
        )
    headers = (
        "rule",
        "cases",
        "mispredicted",
        "bytes wrong",
        "counted",
        "miscounted",
        "run",
        "wrong numbers",
        "refused",
    )
    print(f"\n{target}\n{tabulate(table, headers, tablefmt='github')}")
    if wrong:
        for row in rows:
            if row["predicted"] != row["compiled"] or not row["equal"] or row["counted"] not in (None, row["compiled"]):
                print(json.dumps(row))


if __name__ == "__main__":
    main()
