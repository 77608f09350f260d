"""Random programs planned and predicted for every kind of device: no exception, no figure that is none.

    python benchmarks/never_fails.py --seeds 0:2000 --rows out/never_fails.jsonl
    python benchmarks/never_fails.py --seeds 17:18 --steps 3 --devices tpu-v5e    (one of them, its beginning only)

A program is a seed's (`tests/random_programs.py`); each has a mesh of its own. For every device it is read, planned
within two seconds of search, annotated at random too, and both are predicted, written into the module and checked. A
(seed, device) is one line of the rows' file, and is not run again while it stands there. `--compile` also compiles
every so many-th program, unsharded, with XLA for CPU: so that they are programs. Exit status 1: something failed.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoshard.mesh import Mesh
from autoshard.program import Program
from tests.random_programs import DEVICES, MESHES, check, random_program

ROOT = Path(__file__).resolve().parents[1]
COMPILED = "compiled"


def main() -> int:
    """Run what is not there yet, and say what came of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="first:limit")
    parser.add_argument("--steps", type=int, help="only so many steps of each program")
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--compile", type=int, default=0, help="every so many-th program is compiled for CPU")
    parser.add_argument("--limit", type=int, default=180, help="seconds that a program may take on one device")
    parser.add_argument("--rows", type=Path, help="jsonl that results are added to")
    asked = parser.parse_args()
    first, _, limit = asked.seeds.partition(":")
    seeds, devices = range(int(first), int(limit)), asked.devices.split(",")
    there = asked.rows.read_text().splitlines() if asked.rows and asked.rows.exists() else []
    rows = {(row["seed"], row["device"]): row for row in map(json.loads, there)}
    signal.signal(signal.SIGALRM, _too_long)
    for seed in seeds:
        wanted = [*devices, COMPILED] if asked.compile and seed % asked.compile == 0 else devices
        missing = [device for device in wanted if (seed, device) not in rows]
        program = random_program(seed, asked.steps) if missing else None
        for device in missing:
            assert program is not None
            rows[seed, device] = row = {
                "seed": seed,
                "device": device,
                **ran(program, seed, device, asked.steps, asked.limit),
            }
            if row["error"]:
                print(f"{seed} {device}: {row['error']}", flush=True)
            if asked.rows:
                asked.rows.parent.mkdir(parents=True, exist_ok=True)
                with asked.rows.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    return report([row for row in rows.values() if row["seed"] in seeds and row["device"] in [*devices, COMPILED]])


def ran(program: Program, seed: int, device: str, steps: int | None, limit: int) -> dict[str, Any]:
    """How one program went on one device: the error in a line, empty where there is none, CPU seconds."""
    error, started = "", time.process_time()
    signal.alarm(limit)
    try:
        if device == COMPILED:
            compiles(random_program(seed, steps, "cpu"))
        else:
            check(program, Mesh(MESHES[seed % len(MESHES)], device=device), seed)
    except Exception as raised:
        ours = [each for each in traceback.extract_tb(raised.__traceback__) if each.filename.startswith(str(ROOT))]
        ours = [each for each in ours if "site-packages" not in each.filename]
        where = ", ".join(f"{Path(each.filename).relative_to(ROOT)}:{each.lineno}" for each in ours[-2:])
        error = f"{type(raised).__name__}: {str(raised).splitlines()[:1]} at {where}"
    finally:
        signal.alarm(0)
    return {"ops": len(program.ops), "error": error, "cpu_s": round(time.process_time() - started, 3)}


def _too_long(*_: object) -> None:
    raise TimeoutError("it took too long")


def compiles(program: Program) -> None:
    """Compile a program for CPU as it is."""
    import jax
    from jax._src.lib import xla_client

    client = jax.devices("cpu")[0].client
    client.compile_and_load(program.stablehlo, client.devices()[:1], xla_client.CompileOptions())


def report(rows: list[dict[str, Any]]) -> int:
    """Print counts, CPU seconds and failures, those of one place together."""
    failed: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["error"]:
            failed[re.sub(r"\d+(?=[^/:]*\[|[^:]*'\])", "#", row["error"])].append(f"{row['seed']} {row['device']}")
    for device in sorted({row["device"] for row in rows}):
        mine = [row for row in rows if row["device"] == device]
        slowest = max(mine, key=lambda row: row["cpu_s"])
        print(
            f"{device}: {len(mine)} programs, {sum(bool(row['error']) for row in mine)} failed, "
            f"{sum(row['cpu_s'] for row in mine):.0f} CPU s, slowest {slowest['cpu_s']:.1f} s (seed {slowest['seed']})"
        )
    ops = sorted({row["seed"]: row["ops"] for row in rows}.values())
    if ops:
        print(f"ops of a program: {ops[len(ops) // 2]} in the middle, {ops[-1]} at most")
    for error, where in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"  {len(where)}: {error}\n    {', '.join(where[:5])}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
