"""Writes the tables and figures of README.md and docs/ from the rows in `results/`: `make tables`.

What stands between `<!-- rows: NAME -->` and `<!-- end -->` is what `BLOCKS[NAME]` makes, figures that a page quotes
too. A test holds every page to the rows.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path

from models import DEVELOPED, HELD_OUT, LARGE, MODELS
from results import CLOCK, FIGURES, RESULTS, Row, read
from tabulate import tabulate

from autoshard.cost.machine import cycles
from autoshard.cost.machine.measured import measured
from autoshard.manual import PLANS as MANUAL

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

BY_HAND = tuple(MANUAL)
TARGETS = ("cpu", "h100:8", "h100:2x4", "tpu-v5e:2x4", "tpu-v5p:2x2x2")
TPUS = TARGETS[3:]
SHOWN = {
    "cpu": "CPU",
    "h100:8": "8 H100",
    "h100:2x4": "2 x 4 H100",
    "h100:2x8": "2 x 8 H100",
    "tpu-v5e:2x4": "TPU v5e 2x4",
    "tpu-v5p:2x2x2": "TPU v5p 2x2x2",
}
PLANS = ("auto", "dp", "fsdp", "megatron", "expert", "embedding")
SMALL_KIND = 0.01
"""A kind with a smaller part of the bytes, compiled and predicted, is not judged by itself."""
LIMITS = {"bytes": 0.10, "kind": 0.20, "memory": 0.15}
"""What automatic plans and those by hand are to be within."""

QUALITY_MODELS = ("mlp", "gpt2", "llama", "bert", "moe", "dlrm", "vit", "resnet", *LARGE, "t5", "mixtral")
BF16_PROGRAMS = (
    *("decoder", "decoder, no checkpoints", "decoder, untied", "decoder, 32,000 tokens", "decoder, float32 masters"),
    *("decoder, autocast", "GPT-2's layers, autocast, untied", "mixture of experts", "ViT", "MLP with RMSNorm"),
)
SOLVED = {
    "tight": (["mlp", "gpt2", "llama", "vit", "bert", "dlrm"], ["h100:8", "tpu-v5p:2x2x2"], ["unlimited", "tight"]),
}
"""Tables of `limits.py`: models, targets and plans."""
BF16_DEEP = ("deep decoder", "deep decoder, no checkpoints", "deep GPT-2, autocast", "deep mixture of experts")
FILES = {
    "compiled": (
        "python benchmarks/compiled.py",
        [
            *product(MODELS, TARGETS, PLANS),
            *product(MODELS, ("cpu", "h100:8", *TPUS), ("random0", "random1")),
        ],
    ),
    "held_out": (
        "python benchmarks/compiled.py --models held-out --targets tpu-v5e:2x4,tpu-v5p:2x2x2 "
        "--plans auto,dp,fsdp,megatron --out benchmarks/results/held_out.csv",
        list(product(HELD_OUT, TPUS, PLANS[:4])),
    ),
    "developed": (
        "python benchmarks/compiled.py --models developed --targets tpu-v5e:2x4,tpu-v5p:2x2x2 "
        "--plans auto,dp,fsdp,megatron --out benchmarks/results/developed.csv",
        list(product(DEVELOPED, TPUS, PLANS[:4])),
    ),
    "quality": (
        "python benchmarks/quality.py --best 2 --cycles",
        list(product(QUALITY_MODELS, ("tpu-v5e:2x4", "h100:8", "h100:2x8"), ("solver", "plan()"))),
    ),
    "bf16_gpu": (
        "python benchmarks/bf16.py`, and with `--deep --targets h100:8 --plans dp,fsdp,megatron,auto",
        [
            *product(BF16_PROGRAMS, ("h100:8", "h100:2x8"), ("auto", "fsdp")),
            *product(BF16_DEEP, ("h100:8",), ("dp", "fsdp", "megatron", "auto")),
        ],
    ),
    "bf16_tpu": (
        "python benchmarks/bf16.py --targets tpu-v5e:2x4,tpu-v5p:2x2x2 --plans dp,fsdp,megatron,auto "
        "--out benchmarks/results/bf16_tpu.csv`, and with `--deep --targets tpu-v5e:2x4",
        [
            *product(BF16_PROGRAMS, TPUS, ("dp", "fsdp", "megatron", "auto")),
            *product(BF16_DEEP, TPUS[:1], ("dp", "fsdp", "megatron", "auto")),
        ],
    ),
    "random_nets": (
        "python benchmarks/random_nets.py",
        list(product([f"random net {seed}" for seed in range(100, 118)], TPUS[:1], ("dp", "fsdp"))),
    ),
    "limits": (
        "python benchmarks/limits.py",
        [each for table in SOLVED.values() for each in product(*table)],
    ),
}
"""Name of a file -> the command that makes its rows, and the (model, target, plan) that are to be in it."""


@cache
def rows(name: str) -> list[Row]:
    """The rows of a file."""
    return read(RESULTS / f"{name}.csv")


def judged(name: str) -> list[Row]:
    """Those that were compiled, random plans apart."""
    return [row for row in rows(name) if "compiled_s" in row and not row["plan"].startswith("random")]


def off(row: Row, figure: str) -> float:
    """How far a prediction is off, signed, as a part of what was compiled; 0/0 is 0."""
    predicted, compiled = row[f"predicted_{figure}"], row[f"compiled_{figure}"]
    if predicted == compiled:
        return 0.0
    return (predicted - compiled) / compiled if compiled else float("inf")


def worst_kind(row: Row) -> float:
    """How far the kind of collective that is furthest off is, over all axes."""
    sums: dict[str, Row] = {}
    for each in filter(None, row.get("collectives", "").split("; ")):
        kind, _, predicted, compiled, _ = each.split(" ")
        found = sums.setdefault(kind, {"predicted_bytes": 0, "compiled_bytes": 0})
        found["predicted_bytes"] += int(predicted)
        found["compiled_bytes"] += int(compiled)
    large = (each for each in sums.values() if max(each.values()) >= SMALL_KIND * row["compiled_bytes"])
    return max((off(each, "bytes") for each in large), key=abs, default=0.0)


def distinct(some: Iterable[Row]) -> int:
    """How many results differ: one program on 8 and on 2 x 4 GPUs, or made by two plans, counts once."""
    figures = [name for name in FIGURES if not name.endswith("_s")]
    return len({(row["model"], row["target"].partition(":")[0], *(row[name] for name in figures)) for row in some})


def percent(value: float) -> str:
    """Signed, in percent."""
    return f"{100 * value:+.1f}" if abs(value) >= 5e-4 else "0"


def mean(values: Iterable[float]) -> float:
    """In percent, of absolute values."""
    return 100 * statistics.fmean(map(abs, values))


def markdown(lines: list[list[str]], headers: list[str]) -> str:
    """A table."""
    return tabulate(lines, headers, "github", disable_numparse=True)


# What made the rows


def made(name: str) -> str:
    """Command, date, versions and commits of a file, and which of its rows are missing."""
    command, wanted = FILES[name]
    found = rows(name)
    if not found:
        return f"**No row is made yet** (`{command}`)."
    commits, dates, versions = (sorted({row[column] for row in found}) for column in ("commit", "date", "versions"))
    text = (
        f"Rows: `benchmarks/results/{name}.csv`, made by `{command}` ({' to '.join({dates[0]: 0, dates[-1]: 0})}, "
        f"commit {', '.join(commits)}; {'; '.join(versions).replace('-', ' ')})."
    )
    there = {(row["model"], row["target"], row["plan"]) for row in found}
    missing = [each for each in wanted if each not in there]
    if missing:
        places: dict[str, dict[str, int]] = {}
        for model, target, plan in missing:
            found_on = places.setdefault("random plans on " * plan.startswith("random") + SHOWN[target], {})
            found_on[model] = found_on.get(model, 0) + 1
        every = len({model for model, _, _ in wanted})
        listed = (
            f"{place} {sum(of.values())}{'' if len(of) == every else ' (' + ', '.join(of) + ')'}"
            for place, of in places.items()
        )
        text += f" **Missing are {len(missing)} of {len(wanted)} rows**, for want of time: {'; '.join(listed)}."
    return text


# docs/trust.md


def collectives() -> str:
    """Per plan fidelity, worst kind and memory in one cell."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows("compiled"):
        text = "-" if "left_out" in row else "error"
        if "compiled_s" in row:
            text = f"{100 * row['fidelity']:.1f} / {percent(worst_kind(row))} / {percent(off(row, 'memory'))}"
        cells.setdefault((row["model"], row["target"]), {})[row["plan"]] = text
    order = sorted(cells, key=lambda place: ([*MODELS].index(place[0]), TARGETS.index(place[1])))
    lines = [[model, target, *(cells[model, target].get(plan, "") for plan in PLANS)] for model, target in order]
    return markdown(lines, ["model", "target", *PLANS])


def wrong(row: Row) -> dict[str, float]:
    """What of a row is outside the limits."""
    found = {"bytes": row["fidelity"], "kind": worst_kind(row), "memory": off(row, "memory")}
    return {name: found[name] for name, limit in LIMITS.items() if abs(found[name]) > limit}


def outside(name: str = "compiled") -> str:
    """Plans outside the limits, furthest off first."""
    found = judged(name)
    bad = sorted((row for row in found if wrong(row)), key=lambda row: -max(map(abs, wrong(row).values())))
    limits = ", ".join(f"{name} {100 * limit:.0f} %" for name, limit in LIMITS.items())
    lines = [
        f"- {row['model']}, {row['target']}, {row['plan']}: "
        + ", ".join(f"{name} {percent(value)}" for name, value in wrong(row).items())
        for row in bad
    ]
    return "\n".join([f"Outside the limits ({limits}): {len(bad)} of {len(found)}.", *([""] if lines else []), *lines])


def means(sets: dict[str, list[Row]] | None = None) -> str:
    """Per set and target: how many plans, and how far predictions are off."""
    lines = []
    for (name, some), target in product((sets or {"": judged("compiled")}).items(), SHOWN):
        found = [row for row in some if row["target"] == target]
        if not found:
            continue
        fidelity, memory = ([row["fidelity"] for row in found], [off(row, "memory") for row in found])
        seconds = [off(row, "s") for row in found]
        lines.append(
            [
                *([name] if sets else []),
                SHOWN[target],
                f"{len(found)}, {distinct(found)}",
                f"{mean(fidelity):.2f}, {100 * max(fidelity):.1f}",
                f"{mean(memory):.1f}, {percent(max(memory, key=abs))}, {sum(abs(each) > 0.15 for each in memory)}",
                f"{mean(seconds):.1f}, {100 * statistics.median(map(abs, seconds)):.1f}",
                f"{mean(off(row, 'traffic') for row in found):.1f}",
                percent(max((off(row, "flops") for row in found), key=abs)),
            ]
        )
    headers = ["target", "plans, distinct", "bytes of collectives: mean, worst", "memory: mean, worst, over 15 %"]
    headers += ["step time: mean, median", "memory traffic: mean", "FLOPs: worst"]
    return markdown(lines, [*(["set"] if sets else []), *headers])


def summary() -> str:
    """In a few sentences."""
    found = judged("compiled")
    on = {"CPU and H100": [row for row in found if not row["target"].startswith("tpu")]}
    on["TPU"] = [row for row in found if row["target"].startswith("tpu")]
    memory = {side: [abs(off(row, "memory")) for row in some] for side, some in on.items() if some}
    said = ", ".join(
        f"{sum(each <= 0.15 for each in values)} of {len(values)} on {side} (mean {mean(values):.1f} %)"
        for side, values in memory.items()
    )
    exact = sum(row["fidelity"] < 5e-4 for row in found)
    text = (
        f"Of {len(found)} plans of twelve models, automatic and by hand, {distinct(found)} are distinct programs. The "
        f"bytes of collectives are off by at most {100 * max(row['fidelity'] for row in found):.1f} %, errors not "
        f"cancelled (as sums {100 * max(abs(off(row, 'bytes')) for row in found):.1f} %), and exact in {exact}; "
        f"each kind within {100 * max(abs(worst_kind(row)) for row in found):.0f} %; memory within 15 % in {said}."
    )
    if random := random_rows():
        bad = sum(row["fidelity"] > 0.1 for row in random)
        text += f" Of {len(random)} random plans, one random strategy per op, {bad} are off by more than 10 %."
    return text


def random_rows() -> list[Row]:
    """Those of random plans that were compiled."""
    return [row for row in rows("compiled") if row["plan"].startswith("random") and "compiled_s" in row]


def sets() -> str:
    """What the twelve models at f32 do not show."""
    files = {"held out": "held_out", "developed": "developed", "bf16": "bf16_gpu", "bf16, TPU": "bf16_tpu"}
    return means({name: judged(file) for name, file in files.items()} | {"random plans": random_rows()})


# docs/solver.md


def tight() -> str:
    """Memory, MB as predicted and as compiled, and steps without a limit and within a tight one."""

    def memory(row: Row) -> str:
        return ", ".join(f"{row[f'{side}_memory'] / 1e6:.1f}" for side in ("predicted", "compiled"))

    lines = []
    for (model, target), found in sorted(by_place("limits").items(), key=lambda each: TARGETS.index(each[0][1])):
        free, within = found.get("unlimited", {}), found.get("tight", {})
        if "compiled_s" not in free:
            continue
        line = [
            model,
            SHOWN[target],
            memory(free),
            f"{within['limit'] / 1e6:.1f}",
            "none found",
            f"{1e3 * free['compiled_s']:.3f}",
        ]
        if "compiled_s" in within:
            line[4] = memory(within)
            line += [f"{1e3 * within['compiled_s']:.3f}", ratio(within["compiled_s"] / free["compiled_s"])]
            line += [f"{within['gap']:.2%}" if "gap" in within else "not known"]
        lines.append(line)
    headers = ["model", "target", "no limit: MB predicted, compiled", "limit, MB", "within it: MB predicted, compiled"]
    return markdown(lines, [*headers, "step, ms: no limit", "within it", "within it / no limit", "gap"])


# Quality


def by_place(name: str) -> dict[tuple[str, str], dict[str, Row]]:
    """(model, target) -> plan -> row."""
    places: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows(name):
        places.setdefault((row["model"], row["target"]), {})[row["plan"]] = row
    return places


def ratio(value: float | None) -> str:
    """Three digits."""
    return "" if value is None else f"{value:.3f}"


CLOCKS = {"compiled_s": "in sequence", "compiled_overlapped_s": "as scheduled", CLOCK: "by libtpu"}
"""Step time of a compiled program -> how the tables call it."""


def over_best(found: dict[str, Row], plan: str, figure: str) -> float | None:
    """A plan's figure over that of the best by hand; None where one is missing."""
    best = min((row[figure] for name, row in found.items() if name in BY_HAND and figure in row), default=None)
    return found[plan][figure] / best if best and figure in found.get(plan, {}) else None


def quality() -> str:
    """The solver's plan beside the plans by hand that were compiled, ms as scheduled."""
    lines = []
    for place, found in by_place("quality").items():
        times = {name: row["compiled_overlapped_s"] for name, row in found.items() if "compiled_overlapped_s" in row}
        by_hand = sorted((seconds, name) for name, seconds in times.items() if name in BY_HAND)
        listed = ", ".join(f"{name} {1e3 * seconds:.3f}" for seconds, name in by_hand)
        own = [f"{1e3 * times[plan]:.3f}" if plan in times else "" for plan in ("solver", "plan()")]
        over = (over_best(found, "solver", figure) for figure in CLOCKS)
        lines.append([*place, *own, listed, *("" if value is None else f"{value:.3f}" for value in over)])
    return markdown(lines, ["model", "target", "solver", "plan()", "by hand", *CLOCKS.values()])


def qualities() -> str:
    """Per target the range of the solver's plan over the best by hand, by each clock; then who is above 1."""
    places = by_place("quality")
    ratios = {
        (*place, shown): value
        for place, found in places.items()
        for figure, shown in CLOCKS.items()
        if (value := over_best(found, "solver", figure)) is not None
    }
    lines = []
    for target, title in SHOWN.items():
        of = {
            c: [value for (_, on, clock), value in ratios.items() if (on, clock) == (target, c)]
            for c in CLOCKS.values()
        }
        if most := max(map(len, of.values())):
            cells = (f"{min(values):.2f} to {max(values):.2f}" if values else "" for values in of.values())
            lines.append([title, str(most), *cells])
    above = sorted(((value, *place) for place, value in ratios.items() if value > 1.0005), reverse=True)
    listed = ", ".join(f"{model} on {SHOWN[on]} ({value:.3f} {clock})" for value, model, on, clock in above) or "none"
    return f"{markdown(lines, ['target', 'models', *CLOCKS.values()])}\n\n**Above 1: {listed}.**"


def random_nets() -> str:
    """Nets of convolutions that nobody looked at, in a sentence."""
    found = judged("random_nets")
    errors = {figure: [off(row, figure) for row in found] for figure in ("memory", "bytes", "s")}
    said = ", ".join(
        f"{what} {mean(errors[figure]):.1f} and {percent(max(errors[figure], key=abs))} %"
        for what, figure in (("memory", "memory"), ("bytes of collectives", "bytes"), ("step time", "s"))
    )
    nets = len({row["model"] for row in found})
    return f"Of {len(found)} plans of {nets} such nets, off on average and at worst: {said}."


# Recomputation


def remat() -> str:
    """Programs without and with recomputation: memory as predicted and compiled, compiled steps; and how far off."""
    with (RESULTS / "remat.csv").open(newline="") as lines:
        found = list(csv.DictReader(lines))
    errors = [int(row["predicted_memory"]) / int(row["compiled_memory"]) - 1 for row in found]
    by_row: dict[str, dict[str, dict[str, str]]] = {}
    for row in found:
        by_row.setdefault(row["row"], {})[row["remat"]] = row
    table = []
    for name, pair in by_row.items():
        model, _, target = name.partition("/")
        line = [model, SHOWN[target]]
        for row in (pair["none"], pair["full"]):
            line.append(" / ".join(f"{int(row[f'{side}_memory']) / 1e9:.2f}" for side in ("predicted", "compiled")))
        table.append([*line, *(f"{1e3 * float(pair[each]['compiled_s']):.1f}" for each in ("none", "full"))])
    headers = ["four layers of", "target", "GB: nothing recomputed", "all recomputed", "step, ms: nothing", "all"]
    near = sum(abs(error) <= LIMITS["memory"] for error in errors)
    exact = sum(float(row["fidelity"]) < SMALL_KIND for row in found)
    said = (
        f"Memory is within 15 % in {near} of {len(found)}, off by {mean(errors):.1f} % on average, "
        f"{percent(max(errors, key=abs))} % at worst; bytes of collectives are as compiled in {exact}."
    )
    return f"{markdown(table, headers)}\n\n{said}"


def measured_errors() -> str:
    """Errors of the models in `measured.toml` on rows that were not fitted, in percent."""
    sets = {
        "products-pairs": "products, m from 256: pairs of n and k", "products-rows": "products, m from 256: m",
        "products-beyond": "products, larger than any fitted", "products-small": "products, m below 256",
        "attention-long": "attention, from 256 tokens", "attention-short": "attention, shorter",
        "attention-windows": "attention, window of 128", "collectives-large": "collectives, from 64 KiB",
        "collectives-small": "collectives, smaller",
    }  # fmt: skip
    kinds = ("a100", "h100", "h200", "b200")
    errors = {kind: known.errors for kind in kinds if (known := measured(kind)) is not None}

    def cell(of: Mapping[str, float] | None) -> str:
        return "" if of is None else f"{of['median']:.1%}, {of['p90']:.1%}, {of['worst']:.0%} of {of['rows']:.0f}"

    rows = [[title, *(cell(errors[kind].get(name)) for kind in kinds)] for name, title in sets.items()]
    return tabulate(rows, ["held out", *map(str.upper, kinds)], "github", disable_numparse=True)


def cycles_errors() -> str:
    """Errors of the models in `cycles.toml` on kernels of programs that were not fitted."""
    sets = {
        "products": "products",
        "convolutions": "convolutions",
        "others": "without products",
        "long": "10,000 cycles and more",
    }
    kinds = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
    errors = {kind: known.errors for kind in kinds if (known := cycles.model(kind)) is not None}

    def cell(of: Mapping[str, float]) -> str:
        return f"{of['median']:.1%}, {of['p90']:.0%}, {of['sum']:.2f} of {of['kernels']:.0f}"

    rows = [[title, *(cell(errors[kind][name]) for kind in kinds)] for name, title in sets.items()]
    return tabulate(rows, ["held out", *kinds], "github", disable_numparse=True)


def real() -> str:
    """Programs at full size: how they were planned, and figures as predicted and compiled."""
    with (RESULTS / "real.csv").open(newline="") as lines:
        found = [row for row in csv.DictReader(lines) if row["compiled_memory"]]
    table = []
    for row in found:
        program, _, target = row["row"].partition("/")
        gigabytes, seconds = (
            [float(row[f"{side}_{what}"]) * scale for side in ("predicted", "compiled")]
            for what, scale in (("memory", 1e-9), ("s", 1.0))
        )
        table.append(
            [
                program + (f", `--remat {row['remat']}`" if row["remat"] else ""),
                f"{target} as {row['mesh']}",
                row["plan_cpu_s"],
                f"{100 * float(row['gap']):.1f}",
                " / ".join(f"{each:.3f}" for each in seconds),
                " / ".join(f"{each:.1f}" for each in gigabytes),
                percent(gigabytes[0] / gigabytes[1] - 1),
                f"{100 * float(row['fidelity']):.1f}",
            ]
        )
    headers = ["program", "target, mesh", "CPU s", "gap, %", "step, s", "GB a device", "memory, %", "bytes, %"]
    errors = [int(row["predicted_memory"]) / int(row["compiled_memory"]) - 1 for row in found]
    near = sum(abs(error) <= LIMITS["memory"] for error in errors)
    exact = sum(float(row["fidelity"]) <= 0.05 for row in found)
    said = (
        f"Memory is within 15 % in {near} of {len(found)}, {percent(max(errors, key=abs))} % at worst; "
        f"bytes of collectives within 5 % in {exact}."
    )
    return f"{markdown(table, headers)}\n\n{said}"


BLOCKS: dict[str, Callable[[], str]] = {
    "collectives": collectives,
    "outside": outside,
    "means": means,
    "summary": summary,
    "sets": sets,
    "held_out": partial(outside, "held_out"),
    "developed": partial(outside, "developed"),
    "bf16": partial(outside, "bf16_gpu"),
    "bf16_tpu": partial(outside, "bf16_tpu"),
    "tight": tight,
    "random_nets": random_nets,
    "remat": remat,
    "real": real,
    "quality": quality,
    "qualities": qualities,
    "measured": measured_errors,
    "cycles": cycles_errors,
    **{f"made_{name}": partial(made, name) for name in FILES},
}


def written(page: str) -> str:
    """A page as the rows have it."""
    return MARKED.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", page)


def main() -> None:
    """Write the pages; with `--check` only say which of them the rows have otherwise."""
    stale = [page for page in PAGES if written(page.read_text()) != page.read_text()]
    if "--check" not in sys.argv:
        for page in stale:
            page.write_text(written(page.read_text()))
    elif stale:
        sys.exit(f"`make tables` changes {', '.join(page.name for page in stale)}")


if __name__ == "__main__":
    main()
