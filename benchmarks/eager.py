"""Captured programs held against eager PyTorch: models × optimizers × front ends × what is run.

    python benchmarks/eager.py --rows out/eager.jsonl                     (small models under every optimizer)
    python benchmarks/eager.py --rows out/eager.jsonl --models zoo        (the zoo's entries, under their own)
    python benchmarks/eager.py --rows out/eager.jsonl --models gpt2,llama --optimizers AdamW --outputs program,to_jax
    python benchmarks/eager.py --rows out/eager.jsonl --markdown          (the table of what was run)
    python benchmarks/eager.py --rows out/eager.jsonl --wrong             (every row that is not equal)

A row is one model, optimizer (or `gradients only`, `forward only`), front end and output (`program`, the captured
module on one device; `lower`, the module that `autoshard lower` writes, and `to_jax`, both on a mesh of 2x4): the loss,
gradients or outputs, and all parameters, buffers and optimizer states after each of three steps, as
`autoshard/verify/eager.py` judges them. `--outputs to_dtensor` takes four processes on 2x2, a row. Rows that the file
has, made of the same sources, are not run again. Programs that draw random numbers are left out by name: jax draws
others than PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # numba imports a package `coverage`, if there is one: a file beside this is not it

from benchmarks import coverage  # noqa: E402

FRONTENDS = ("torch_xla", "torchax")
OUTPUTS = ("program", "lower", "to_jax")
DTENSOR = "to_dtensor"
OWN = "its own"
Row = dict[str, Any]
Key = tuple[str, str, str, str]


def key_of(row: Row) -> Key:
    """What was run."""
    return row["model"], row["optimizer"], row["frontend"], row["output"]


def run(keys: list[Key], rows: Path) -> None:
    """Measure what all is of one model, in this process; a row is written before and after."""
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={coverage.DEVICES}"
    from autoshard.errors import AutoshardError
    from autoshard.verify.run import random_op
    from benchmarks import eager_cases, eager_dtensor, eager_steps

    pair, program, made = None, None, None
    for model, optimizer, frontend, output in keys:
        row: Row = {"model": model, "optimizer": optimizer, "frontend": frontend, "output": output}
        say(rows, row | {"state": "died"})
        began = time.process_time()
        try:
            if pair is None or made is None or made[:2] != (model, optimizer):
                pair, program = None, None
                source = eager_cases.source(model, optimizer)
                pair = eager_steps.Pair(source, eager_cases.WARM.get(optimizer, 1))
            if program is None or made is None or made[2] != frontend:
                program = None
                made = (model, optimizer, frontend)
                program = pair.captured(frontend)
            drawn = random_op(program.ops)
            if drawn is not None:
                row |= {"state": "random", "said": drawn.name}
            else:
                if output == DTENSOR:
                    found = eager_dtensor.of_to_dtensor(pair, program, model, optimizer)
                else:
                    found = eager_steps.OUTPUTS[output](pair, program)
                row |= {"state": "equal" if found.equal else "differs", "tensors": found.tensors}
                row |= {"worst": min(found.worst, 1e9), "where": found.where, "untold": len(found.untold)}
                row |= {"neighbours": found.neighbours}
        except AutoshardError as error:
            row |= {"state": "refused", "said": str(error)}
        except Exception as error:
            row |= {"state": "failed", "said": f"{type(error).__name__}: {error}"[:400]}
        say(rows, row | {"cpu_seconds": time.process_time() - began})


def say(rows: Path, row: Row) -> None:
    """Add a row to a file."""
    with rows.open("a") as out:
        out.write(json.dumps(row) + "\n")


def measured(keys: list[Key], limit: float) -> Iterable[Row]:
    """The rows of one model, in forks of this process, which may die."""
    while keys:
        with tempfile.TemporaryDirectory(prefix="autoshard-eager-") as directory:
            folder = Path(directory)
            rows = folder / "rows.jsonl"
            ended = coverage.forked(partial(run, keys, rows), folder, coverage.DEVICES, limit)
            found = list(read(rows).values())
            if not found:
                raise RuntimeError(ended.get("said", "nothing was run"))
            if "died" in ended:
                found[-1]["said"] = ended["died"]
        yield from found
        keys = keys[len(found) :]


def read(path: Path) -> dict[Key, Row]:
    """The newest row of each key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {key_of(row): row for row in map(json.loads, lines)}


def wanted(models: str, optimizers: str, frontends: str, outputs: str) -> dict[str, list[Key]]:
    """Model -> what is asked of it."""
    from benchmarks import eager_cases

    named = {"small": list(eager_cases.MODELS), "zoo": list(coverage.builders())}.get(models, models.split(","))
    without = [eager_cases.GRADIENTS, eager_cases.FORWARD]
    of_all = [*eager_cases.optimizers(), *without] if optimizers == "all" else optimizers.split(",")
    of_zoo = [OWN, *without] if optimizers == "all" else [o if o in without else OWN for o in of_all]
    return {
        model: [
            (model, optimizer, frontend, output)
            for optimizer in (of_all if model in eager_cases.MODELS else dict.fromkeys(of_zoo))
            for frontend in frontends.split(",")
            for output in outputs.split(",")
        ]
        for model in named
    }


def markdown(rows: Iterable[Row]) -> str:
    """Per front end and output: counts, and the worst case beside them."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["output"], row["frontend"]].append(row)
    states = ("equal", "differs", "refused", "random", "failed", "died")
    head = ["output", "front end", "models", "optimizers", *states, "tensors", "untold", "worst of equal ones"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (output, frontend), mine in sorted(groups.items()):
        count = Counter(row["state"] for row in mine)
        equal = [row for row in mine if row["state"] == "equal"]
        worst = max(equal, key=lambda row: row["worst"], default=None)
        cells: list[Any] = [output, frontend, len({r["model"] for r in mine}), len({r["optimizer"] for r in mine})]
        cells += [count[state] for state in states]
        cells += [f"{sum(r['tensors'] for r in equal):,}", f"{sum(r['untold'] for r in equal):,}"]
        cells.append(f"{worst['worst']:.2f} of what is allowed: {named(worst)}, {worst['where']}" if worst else "")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def named(row: Row) -> str:
    """Model and optimizer."""
    return f"{row['model']} under {row['optimizer']}"


def line(row: Row) -> str:
    """One row, for a terminal."""
    figures = f"{row.get('worst', 0):8.2g} {row.get('untold', 0):3d} untold {row.get('cpu_seconds', 0):5.1f} s"
    what = row.get("said") or row.get("where", "")
    return f"{row['state']:8s} {named(row):40s} {row['frontend']:9s} {row['output']:8s} {figures}  {what[:200]}"


def main() -> None:
    """Run what is missing, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=HERE.parent / "out" / "eager.jsonl")
    parser.add_argument("--models", default="small", help="names by commas; small, or zoo")
    parser.add_argument("--optimizers", default="all", help="names by commas; all of torch.optim and more")
    parser.add_argument("--frontends", default=",".join(FRONTENDS))
    parser.add_argument("--outputs", default=",".join(OUTPUTS))
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds for a model")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    options = parser.parse_args()
    known = read(options.rows)
    if options.markdown:
        print(markdown(known.values()))
        return
    if options.wrong:
        print("\n".join(line(row) for row in known.values() if row["state"] not in ("equal", "random")))
        return
    coverage.prepare()
    now = coverage.sources_hash()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    asked = wanted(options.models, options.optimizers, options.frontends, options.outputs)
    for keys in asked.values():
        missing = [key for key in keys if known.get(key, {}).get("sources") != now]
        for row in measured(missing, options.time_limit):
            row["sources"] = now
            known[key_of(row)] = row
            say(options.rows, row)
            print(line(row), flush=True)
    print(markdown(known[key] for keys in asked.values() for key in keys if key in known))


if __name__ == "__main__":
    main()
