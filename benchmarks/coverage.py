"""The zoo: which models are planned, lowered, and trained under their plan with equal numbers.

    python benchmarks/coverage.py [ENTRY …] [--workers 2] [--out out/coverage.jsonl] [--again failed] [--markdown]

Every entry of the `zoo_*.py` beside this file is a training step with SGD, small enough to run here. In a process of
its own, which may crash or take too long, it is captured, planned on mesh 2x4 for the device of `zoo_device.toml`, and
trained two steps under the plan on 8 virtual CPU devices, against two steps on one: losses to 1e-5 relative, gradients
of the first step to 1e-5 of each tensor's largest, parameters to 1e-5 (bf16: 2e-2), as `autoshard verify --run` judges.
The plan is the solver's, without plans by hand beside it, so that programs are split.
The one-device reference is PyTorch's own CPU kernels; where numbers are not equal, or are drawn at random, a second
process trains the same steps through torch_xla alone on one device, which also says whether it can.

Results are kept by entry and by a hash of the sources that they depend on (the entries' and the package's); entries
that have one are not run again. Without `--markdown` every result is printed as it comes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

if __name__ == "coverage":  # numba looks for a package of this name, and finds this file from the scripts beside it
    raise ImportError("benchmarks/coverage.py is a script, not the package that measures tests")

HERE = Path(__file__).resolve().parent
if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == HERE:
    sys.path[0] = str(HERE.parent)  # numba imports a package `coverage`, if there is one: this file is not it
ROOT = HERE.parent
MESH = "2x4"
DEVICES = 8
DEVICE = f"{HERE / 'zoo_device.toml'}"
STEPS = 2
TIME_LIMIT_S = 600
LARGEST_SHARE = 0.02
"""Of the predicted step time that ops without a rule may take."""
FASTER_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def entries() -> list[str]:
    """Names of all entries, without importing torch."""
    listing = "import benchmarks.coverage as c; print(' '.join(c.builders()))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", listing], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def builders() -> dict[str, Any]:
    """Entry -> the function that makes its `Source`."""
    from benchmarks import zoo_entry, zoo_hf

    for path in sorted(HERE.glob("zoo_*.py")):
        importlib.import_module(f"benchmarks.{path.stem}")
    return zoo_hf.ENTRIES | zoo_entry.ENTRIES


def sources_hash() -> str:
    """Of everything that results depend on but the versions of packages."""
    digest = sha256()
    for path in sorted(
        [*(ROOT / "autoshard").rglob("*.py"), *(ROOT / "autoshard").rglob("*.toml"), *HERE.glob("zoo_*")]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# One entry, in a process of its own.


def plan_and_run(name: str, folder: Path) -> None:
    """Write `result.json`, renewed after every stage, and the numbers of the run under the plan."""
    result: dict[str, Any] = {"entry": name, "stage": "build"}

    def said(**more: Any) -> None:
        result.update(more)
        (folder / "result.json").write_text(json.dumps(result))

    said()

    from autoshard.frontends.torch_xla.program import prepare_runtime

    prepare_runtime(DEVICES)
    from autoshard.api import plan_program
    from autoshard.attention.form import FUSED
    from autoshard.errors import AutoshardError
    from autoshard.frontends.choose import switches_for
    from autoshard.frontends.switches.autocast import autocast_on
    from autoshard.frontends.torch_xla.program import capture
    from autoshard.graph.rules.base import GATHERED
    from autoshard.mesh import Mesh
    from autoshard.planning.collector import collector_paused
    from autoshard.verify import run_worker

    with autocast_on():
        source = builders()[name]()
    said(stage="capture", elements=sum(p.numel() for p in source.model.parameters()))
    began = time.process_time()
    try:
        with collector_paused():
            asked = {"loss_fn": source.loss_fn, "optimizer": source.optimizer, "switches": switches_for(DEVICE)}
            program = capture(source.model, source.inputs, **asked)
            fused = sum(op.name == FUSED for op in program.ops)
            said(stage="plan", ops=len(program.ops), fused=fused, written_out=len(program.written_out))
            plan = plan_program(program, Mesh.parse(MESH, device=DEVICE), time_limit=120, rivals=False)
    except AutoshardError as error:
        said(cause=str(error), kind=type(error).__name__)
        return
    assert plan.predicted is not None
    step = plan.predicted.step_time_s
    without: dict[str, float] = {}
    whole: dict[str, float] = {}
    for op in plan.replicated_ops:
        of = whole if GATHERED in op.reason else without
        of[op.op] = of.get(op.op, 0.0) + op.cost_s / step
    said(
        stage="run",
        planned=True,
        plan_seconds=time.process_time() - began,
        gap=plan.solver.gap if plan.solver else None,
        split=split_share(plan),
        replicated=without,
        whole=whole,
    )
    began = time.process_time()
    plan.save(folder / "plan.json")
    try:
        compared = run_worker.compare(plan, source, STEPS, keep=folder / "numbers.pt")
    except AutoshardError as error:
        said(cause=str(error), kind=type(error).__name__)
        return
    values, where = judged(compared, compared["optimizer"])
    equal = all(value <= compared["tolerance"] for value in values.values())
    worst = max(values, key=lambda key: values[key])
    said(
        stage="done",
        lowered=True,
        equal=equal,
        **{key: value if math.isfinite(value) else str(value) for key, value in values.items()},
        losses=[str(loss) for loss in (*compared["losses"], *compared["reference_losses"])],
        tolerance=compared["tolerance"],
        optimizer=compared["optimizer"],
        reference=compared["reference"],
        rounding=compared["rounding"],
        beside_one_device=compared["beside_one_device"],
        compiled_once=compared["compiled_once"],
        run_seconds=time.process_time() - began,
        **({} if equal else {"cause": f"{worst} differ by {values[worst]:.1e} ({where.get(worst, '')})"}),
    )


def judged(differences: dict[str, Any], optimizer: str | None) -> tuple[dict[str, float], dict[str, str]]:
    """The differences that count, and in which tensors they are; AdamW's parameters do not (see `verify.run`)."""
    keys = [key for key in ("loss", "gradients", "parameters") if key != "parameters" or optimizer != "AdamW"]
    parts = {
        key: differences[key] if isinstance(differences[key], dict) else {"value": differences[key]} for key in keys
    }
    return {key: part["value"] for key, part in parts.items()}, {
        key: part.get("where", "") for key, part in parts.items()
    }


def split_share(plan: Any) -> float:
    """Part of the elements of what is annotated that each device does not hold."""
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    whole = held = 0.0
    for tensor in (*plan.parameters.values(), *(a for a in plan.activations if a.spec is not None)):
        elements = math.prod(tensor.shape)
        whole += elements
        held += elements / math.prod(sizes[axis] for dim in tensor.spec for axis in dim)
    return 1 - held / whole if whole else 0.0


def alone(name: str, row: dict[str, Any], folder: Path) -> None:
    """Train the entry through torch_xla alone on one device; write `alone.json`."""
    from autoshard.frontends.switches.autocast import autocast_on
    from autoshard.plans.json_format import load
    from autoshard.verify import run_worker

    with autocast_on():
        source = builders()[name]()
    (folder / "alone.json").write_text(json.dumps({"error": "crashed"}))
    try:
        saved = folder / "plan.json"
        reads = load(saved).program.reads if saved.exists() else ()
        tolerance = row.get("tolerance", run_worker.TOLERANCE)
        ran = run_worker.alone(source, STEPS, folder / "numbers.pt", tolerance, reads)
        found: dict[str, Any] = {"losses": [str(loss) for loss in ran["losses"]]}
        if "gradients" in ran:
            found["differences"], found["where"] = judged(ran, row.get("optimizer"))
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    (folder / "alone.json").write_text(json.dumps(found))


# All of them.


def measure(name: str, time_limit: float) -> dict[str, Any]:
    """The row of one entry."""
    with tempfile.TemporaryDirectory(prefix="autoshard-zoo-") as directory:
        folder = Path(directory)
        died = forked(partial(plan_and_run, name, folder), folder, DEVICES, time_limit)
        found = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        row = {"entry": name, **found, **died}
        if not row.get("equal"):
            row.setdefault("cause", row.get("died"))
            died = forked(partial(alone, name, dict(row), folder), folder, 1, time_limit)
            place = folder / "alone.json"
            row["alone"] = {"error": died["died"]} if "died" in died else json.loads(place.read_text())
            against = row["alone"].get("differences")
            if against is not None and all(value <= row["tolerance"] for value in against.values()):
                row |= {"equal": True, "reference": "torch_xla on one device", **against}
        return row


def prepare() -> None:
    """Set the environment of what runs here, and import what every entry needs, so that a fork has it."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FASTER_COMPILES}".strip()
    os.environ.update(
        {"PJRT_DEVICE": "CPU", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1",
         "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1", "XLA_HLO_DEBUG": "1"}
    )  # fmt: skip
    import torch

    builders()
    torch.set_num_threads(1)


def forked(work: Callable[[], None], folder: Path, devices: int, time_limit: float) -> dict[str, Any]:
    """Do it in a fork of this process, which has imported everything and started nothing; says how it ended."""
    child = os.fork()
    if child == 0:
        with (folder / "said").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ["CPU_NUM_DEVICES"] = str(devices)
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + time_limit
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.wait4(child, 0)
            return {"died": f"took longer than {time_limit:.0f} s", "cpu_seconds": time_limit}
        time.sleep(0.05)
    row: dict[str, Any] = {"cpu_seconds": used.ru_utime + used.ru_stime}
    if status:
        lines = [text for text in (folder / "said").read_text().splitlines() if text.strip()]
        code = os.waitstatus_to_exitcode(status)
        row["died"] = f"exit status {code}: {lines[-1][:400] if lines else ''}"
        row["said"] = "\n".join(lines[-40:])
    return row


def serve() -> None:
    """A worker: names of entries come in, a line each, and rows go out."""
    prepare()
    for text in sys.stdin:
        name, limit = text.split()
        print(json.dumps(measure(name, float(limit))), flush=True)


class Worker:
    """A process that measures one entry after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, name: str, time_limit: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {time_limit}\n")
        self.process.stdin.flush()
        row: dict[str, Any] = json.loads(self.process.stdout.readline())
        return row


def state(row: dict[str, Any]) -> str:
    """`equal`, or how far the entry came."""
    if row.get("equal"):
        return "equal"
    if "error" in row.get("alone", {}) and not row.get("lowered"):
        return "not by torch_xla"
    return "not equal" if row.get("lowered") else f"fails: {row.get('stage', 'build')}"


def share(row: dict[str, Any]) -> float:
    """Part of the predicted step in ops that are whole for want of a rule."""
    return sum(row.get("replicated", {}).values())


def shares(row: dict[str, Any]) -> str:
    """What is whole on every device, with its part of the predicted step: for want of a rule, or as XLA gathers it."""
    without = [f"{op} (no rule) {part:.2%}" for op, part in sorted(row.get("replicated", {}).items())]
    return ", ".join([*without, *(f"{op} {part:.2%}" for op, part in sorted(row.get("whole", {}).items()))])


def line(row: dict[str, Any]) -> str:
    """One row, for a terminal."""
    return (
        f"{row['entry']:32s} {state(row):18s} split {row.get('split', 0):4.0%} plan {row.get('plan_seconds', 0):5.1f} "
        f"cpu {row.get('cpu_seconds', 0):5.1f}  {shares(row)}  {row.get('cause') or ''}"
    )


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Entry -> its newest row."""
    rows = {}
    if path.exists():
        for text in path.read_text().splitlines():
            row = json.loads(text)
            rows[row["entry"]] = row
    return rows


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds per process")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "coverage.jsonl")
    parser.add_argument(
        "--again", choices=("stale", "failed", "all", "none"), default="stale",
        help="which entries with a result are run again: those of other sources; those not equal; all; none",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print the table of the results that are there")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    rows = read(options.out)
    names = options.entries or entries()
    if options.markdown:
        print(table([rows[name] for name in names if name in rows]))
        return
    now = sources_hash()
    wanted = [name for name in names if _wanted(rows.get(name), options.again, now)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    queue = iter(wanted)
    lock = threading.Lock()

    def work(lines: TextIO) -> None:
        worker = Worker()
        while (name := next(queue, None)) is not None:
            row = worker.measure(name, options.time_limit)
            row["sources"] = now
            with lock:
                rows[name] = row
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(line(row), flush=True)

    with options.out.open("a") as lines:
        threads = [threading.Thread(target=work, args=(lines,)) for _ in range(min(options.workers, len(wanted)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(summary([rows[name] for name in names if name in rows]))


def _wanted(row: dict[str, Any] | None, again: str, now: str) -> bool:
    if row is None or again == "all":
        return True
    return (again == "failed" and not row.get("equal")) or (again == "stale" and row["sources"] != now)


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Counts, in one line."""
    rows = list(rows)
    trainable = [row for row in rows if state(row) != "not by torch_xla"]
    equal = sum(bool(row.get("equal")) for row in rows)
    costly = [row["entry"] for row in rows if share(row) > LARGEST_SHARE]
    return (
        f"{len(rows)} entries; torch_xla can train {len(trainable)}; equal numbers {equal} "
        f"({equal / max(1, len(trainable)):.1%}); more than {LARGEST_SHARE:.0%} in ops without a rule: "
        f"{', '.join(costly) or 'none'}"
    )


def attentions(row: dict[str, Any]) -> str:
    """How many attentions are one op, and how many written out for want of a kernel."""
    counts = ((row.get("fused"), "fused"), (row.get("written_out"), "written out"))
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of docs/coverage.md."""
    rows = list(rows)
    lines = [
        "| entry | planned | lowered | equal | split | attentions | whole on every device | largest difference "
        "| plan, CPU s | all, CPU s | cause |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        worst = max((float(row[key]) for key in ("loss", "gradients", "parameters") if key in row), default=math.nan)
        yes = ["yes" if row.get(key) else "no" for key in ("planned", "lowered", "equal")]
        cells = [
            row["entry"], *yes, f"{row['split']:.0%}" if "split" in row else "", attentions(row), shares(row),
            f"{worst:.0e}" if "loss" in row else "", f"{row.get('plan_seconds', 0):.1f}",
            f"{row.get('cpu_seconds', 0):.0f}", "" if row.get("equal") else str(row.get("cause", "")).replace("|", "/"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", summary(rows)])


if __name__ == "__main__":
    main()
