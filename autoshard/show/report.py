"""Plans as text: shardings, costs, bound and gap."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoshard.cost.machine.bars import Bars, bar_text
from autoshard.cost.machine.device import DeviceError, default_placement, scheduler_options, slop_of
from autoshard.mesh import Mesh, Spec, describe_mesh, spec_axes
from autoshard.plans.figures import BY_HAND
from autoshard.plans.value import (
    ActivationPlan,
    CollectiveTotal,
    Confirmation,
    Copy,
    MeshTried,
    Plan,
    Predicted,
    Refinement,
    ReplicatedOp,
    SolverInfo,
    TensorPlan,
)
from autoshard.show.terminal import printable
from autoshard.text import columns

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_SHOWN_OPS, _COLUMN = 5, 32


def mesh_text(mesh: Mesh) -> str:
    """A mesh as text, with the link of each axis where axes lie on several."""
    try:
        placement = default_placement(mesh)
    except DeviceError:  # a plan can be shown without its device file
        placement = mesh.placement
    return describe_mesh(mesh, placement if len(set("+".join(placement).split("+"))) > 1 else ())


def scheduler_lines(mesh: Mesh) -> list[str]:
    """What is said of a plan for a kind such as `h100+slop30`: one line or none."""
    percent = slop_of(mesh.device)
    if percent is None:
        return []
    does = f"fills {percent} % of free memory" if percent else "is off"
    return [f"XLA's latency hiding scheduler {does}: plan.to_jax() sets {', '.join(scheduler_options(mesh.device))}"]


def plan_report(plan: Plan) -> str:
    """The whole report, several lines, no trailing newline."""
    parts = [
        f"Plan of a {'training step' if plan.program.kind == 'train' else 'forward pass'} "
        f"({len(plan.program.ops)} aten ops) on {mesh_text(plan.mesh)}"
        + (f", {plan.micro_batches} micro-batches and one update" if plan.micro_batches > 1 else "")
        + (f", gradients clipped to norm {plan.clip_grad_norm:g}" if plan.clip_grad_norm else ""),
        *_options(plan),
        *(f"  {line}" for line in scheduler_lines(plan.mesh)),
        "",
        *module_table(plan),
    ]
    if plan.predicted is not None:
        parts += ["", *predicted_lines(plan.predicted, plan.options.memory, Bars.of_info(plan.info))]
    if plan.confirmed is not None:
        parts.append(confirmed_line(plan.confirmed))
    if plan.solver is not None:
        parts += ["", solver_line(plan.solver, plan.info.get("hidden", 0.0))]
    if plan.refined is not None:
        parts += ["", *refined_lines(plan.refined)]
    if plan.search:
        parts += ["", *search_lines(plan.search, plan.mesh.shape, Bars.of_info(plan.info))]
    parts += ["", *remat_lines(plan), *region_lines(plan), *replicated_lines(plan.replicated_ops)]
    return printable("\n".join(parts))


def _options(plan: Plan) -> list[str]:
    options = plan.options
    said = []
    if options.hints:
        said.append("hints " + "; ".join(f"{name}={layout(spec)}" for name, spec in options.hints.items()))
    if options.keep != "all":
        said.append(f"keep {options.keep}")
    return [f"  with {', '.join(said)}"] if said else []


# --- what splits what --------------------------------------------------------------------------------------------


def layout(spec: Spec) -> str:
    """`[data, -]`, `[data+model, -]`, or `whole`."""
    if not spec_axes(spec):
        return "whole"
    return "[" + ", ".join("+".join(dim) or "-" for dim in spec) + "]"


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key: `h.2` before `h.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


@dataclass(frozen=True)
class _Row:
    module: str
    tensor: str
    shape: str
    layout: str
    reads: str


def module_table(plan: Plan) -> list[str]:
    """One line per tensor of each module, equal lines of numbered modules (`h.0`, `h.1`…) merged.

    Values inside the program follow, per module grouped by sharding.
    """
    rows: list[_Row] = []
    for title, tensors in (("inputs", plan.inputs), ("parameters", plan.parameters), ("buffers", plan.buffers)):
        for name, tensor in sorted(tensors.items(), key=lambda item: natural(item[0])):
            module, _, short = name.rpartition(".")
            rows.append(_row(module if title != "inputs" else "inputs", short, tensor))
    joined = _join(rows) + _optimizer_state(plan) + _join(_activations(plan))
    for name, tensor in plan.outputs.items():
        joined.append(_row("outputs", name, tensor))
    cells = [("module", "tensor", "shape", "split", "read as")] + [
        (row.module or "(root)", row.tensor, row.shape, row.layout, row.reads) for row in joined
    ]
    return ["  " + line for line in columns(cells)]


def _row(module: str, name: str, tensor: TensorPlan) -> _Row:
    return _Row(module, name, _shape(tensor.dtype, tensor.shape), layout(tensor.spec), _reads(tensor.copies))


def _shape(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _reads(copies: Sequence[Copy]) -> str:
    return ", ".join(dict.fromkeys(layout(copy.spec) for copy in copies))


def _join(rows: Iterable[_Row]) -> list[_Row]:
    """Merge rows that differ in numbers only: tensors of a list, then modules."""
    return _join_by(_join_by(rows, "tensor"), "module")


def _join_by(rows: Iterable[_Row], name: Literal["tensor", "module"]) -> list[_Row]:
    """Merge rows that differ only in the numbers of one name."""
    found: dict[tuple[tuple[str, ...], _Row], list[tuple[str, ...]]] = {}
    for row in rows:
        path: str = getattr(row, name)
        rest = replace(row, **{name: ""})
        found.setdefault((tuple(_NUMBER.split(path)), rest), []).append(tuple(_NUMBER.findall(path)))
    return [replace(rest, **{name: _numbered(between, numbers)}) for (between, rest), numbers in found.items()]


def _numbered(between: Sequence[str], numbers: Sequence[tuple[str, ...]]) -> str:
    """A path (`h.`, `.attn`) with the numbers of its members: `h.0-11.attn`."""
    places = [ranges(sorted({int(number) for number in each})) for each in zip(*numbers, strict=True)]
    return between[0] + "".join(place + text for place, text in zip(places, between[1:], strict=True))


def ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers as ranges: `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _optimizer_state(plan: Plan) -> list[_Row]:
    """One line where every state is split like its parameter, else the others."""
    state = plan.optimizer_state
    if not state:
        return []
    other = [
        (name, tensor)
        for name, tensor in state.items()
        if (parameter := _parameter_of(name, plan.parameters)) is None or parameter.spec != tensor.spec
    ]
    rows = (
        []
        if len(other) == len(state)
        else [_Row("optimizer state", f"{len(state) - len(other)} tensors", "", "as its parameter", "")]
    )
    return rows + _join(_row(*name.rpartition(".")[::2], tensor) for name, tensor in other)


def states_of(plan: Plan) -> dict[str, str]:
    """Parameter -> its optimizer states: `2 optimizer states alike`, or how the others are split."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name, state in plan.optimizer_state.items():
        parameter, _, short = name.rpartition(".")
        alike, other = found.setdefault(parameter, ([], []))
        if (of := plan.parameters.get(parameter)) is not None and of.spec == state.spec:
            alike.append(short)
        else:
            other.append(f"{short} {layout(state.spec)}")
    return {
        parameter: ", ".join(
            [f"{len(alike)} optimizer state{'s' if len(alike) > 1 else ''} alike"] * bool(alike) + other
        )
        for parameter, (alike, other) in found.items()
    }


def _parameter_of(state: str, parameters: Mapping[str, TensorPlan]) -> TensorPlan | None:
    return parameters.get(state.rpartition(".")[0])


@dataclass(frozen=True)
class ValueGroup:
    """Values of one module with equal shardings and copies.

    Attributes:
        module: its path; `(optimizer step)` for values of a step after the last op of any module.
        members: the values, in program order.
    """

    module: str
    members: tuple[ActivationPlan, ...]

    @property
    def names(self) -> str:
        """`5 values: add, gelu, ...`."""
        ops = Counter[str]()
        for each in self.members:
            name = each.key.name.split(".")[1:2] or [each.key.name]  # namespace.op.overload
            ops[name[0].removesuffix("_copy")] += 1
        return _values(ops)


def activation_groups(plan: Plan) -> list[ValueGroup]:
    """Per module, values grouped by sharding; the optimizer's last."""
    activations = plan.activations
    last = max((each.key.index for each in activations if each.module), default=-1)
    trains = plan.program.kind == "train" and last >= 0
    groups: dict[tuple[str, str, str], list[ActivationPlan]] = {}
    for each in activations:
        module = each.module or ("(optimizer step)" if trains and last < each.key.index else "")
        groups.setdefault((module, _split(each), _reads(each.copies)), []).append(each)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0].startswith("("), natural(item[0][0])))
    return [ValueGroup(module, tuple(members)) for (module, _, _), members in ordered]


def _split(value: ActivationPlan) -> str:
    return "not pinned" if value.spec is None else layout(value.spec)


def _activations(plan: Plan) -> list[_Row]:
    """A row per group of values, with the ops that make most of them."""
    return [
        _Row(group.module, group.names, "", _split(group.members[0]), _reads(group.members[0].copies))
        for group in activation_groups(plan)
    ]


def _values(names: Counter[str]) -> str:
    """`5 values: add, gelu, ...`: the most frequent ops that fit the column."""
    text = f"{names.total()} value{'s' if names.total() > 1 else ''}:"
    left = len(names)
    for name, _ in sorted(names.items(), key=lambda item: (-item[1], item[0])):
        if left < len(names) and len(text) + len(name) > _COLUMN:
            return f"{text} ..."
        left -= 1
        text += f" {name}" + ("," if left else "")
    return text


# --- what it costs -----------------------------------------------------------------------------------------------


def predicted_lines(predicted: Predicted, limit: int | None = None, bars: Bars | None = None) -> list[str]:
    """Step time and its parts, collectives by kind and axes, memory; how far off they may be, where that is known."""
    step, memory = (f" {bars.step_text()}", f" {bar_text(bars.memory)}") if bars else ("", "")
    lines = [
        f"  step time      {duration(predicted.step_time_s)}{step}; {duration(predicted.overlapped_s)} with "
        "collectives beside kernels",
        f"  MFU            {predicted.mfu:.1%}, in sequence, recomputation not counted",
        f"  compute        {duration(predicted.compute_s)}",
        f"  communication  {duration(predicted.communication_s)}",
    ]
    lines += ["    " + line for line in columns([_collective(each) for each in predicted.collectives])]
    of = "" if limit is None else f" of {size(limit)}"
    return [*lines, f"  peak memory    {size(predicted.peak_memory_bytes)}{memory}{of} per device"]


def confirmed_line(confirmed: Confirmation) -> str:
    """`as compiled  15.2 GB per device: fits (libtpu 0.0.51 for tpu-v5e:2x4, 2 plans compiled in 34 s)`."""
    compiled, plans = confirmed.compiled_bytes, "1 plan" if confirmed.compiles == 1 else f"{confirmed.compiles} plans"
    spent = f"{plans} compiled in {duration(confirmed.seconds)}" if confirmed.compiles else ""
    by = f"{confirmed.compiler} for {confirmed.target}" if confirmed.compiler else ""
    about = ", ".join(filter(None, (by, spent)))
    verdict = confirmed.verdict + (f": {confirmed.note}" if confirmed.note else "")
    said = verdict if compiled is None else f"{size(compiled)} per device: {verdict}"
    return f"  as compiled    {said}" + (f" ({about})" if about else "")


def _collective(total: CollectiveTotal) -> tuple[str, ...]:
    return (total.kind, "over " + ", ".join(map(str, total.axes)), f"x{total.count}", f"{size(total.bytes)} per device")


def bytes_by_kind(figures: Predicted) -> dict[str, int]:
    """Kind of collective -> bytes per device and step, over all axes."""
    found: dict[str, int] = {}
    for each in figures.collectives:
        found[each.kind] = found.get(each.kind, 0) + each.bytes
    return found


def shortest_first(tried: Iterable[MeshTried]) -> list[MeshTried]:
    """Shortest step first, then those without a plan."""
    return sorted(tried, key=lambda each: math.inf if each.step_time_s is None else each.step_time_s)


def search_lines(tried: Sequence[MeshTried], chosen: Sequence[int], bars: Bars | None = None) -> list[str]:
    """A line per mesh shape, shortest step first, ties with the chosen one marked; then those without a plan."""
    best = next((each.step_time_s for each in tried if tuple(each.shape) == tuple(chosen)), None)
    rows: list[tuple[str, ...]] = [("mesh", "step", "objective", "bound", "memory", "")]
    for each in shortest_first(tried):
        times = [duration(time) if time is not None else "-" for time in (each.step_time_s, each.objective, each.bound)]
        memory = "-" if each.peak_memory_bytes is None else size(each.peak_memory_bytes)
        near = bars is not None and best and each.step_time_s and bars.tied(best, each.step_time_s)
        mark = " *" if tuple(each.shape) == tuple(chosen) else " ~" if near else ""
        note = each.note if each.outcome == "planned" else f"{each.outcome}: {each.note}"
        rows.append(
            ("x".join(map(str, each.shape)) + mark, *times, memory, note if len(note) < 120 else note[:117] + "...")
        )
    foot = [f"  {bars.tie_text()}"] if bars is not None else []
    return [f"Mesh shapes tried: {len(tried)}, * as planned", *("  " + line for line in columns(rows)), *foot]


def refined_lines(refined: Refinement) -> list[str]:
    """A line per compiled candidate: the predicted choice first, the one taken marked."""
    rows: list[tuple[str, ...]] = [
        ("candidate", "predicted", "overlapped", "compiled", "overlapped", "compiled memory", "")
    ]
    for each in refined.candidates:
        times = (each.predicted_s, each.predicted_overlapped_s, each.compiled_s, each.compiled_overlapped_s)
        said = [duration(time) if time is not None else "-" for time in times]
        memory = "-" if each.peak_memory_bytes is None else size(each.peak_memory_bytes)
        mark = " *" if each.name == refined.chosen else ""
        rows.append((each.name + mark, *said, memory, each.note if len(each.note) < 120 else each.note[:117] + "..."))
    title = f"Refined for {refined.target}: {len(refined.candidates)} candidates compiled, * taken"
    return [title, *("  " + line for line in columns(rows))]


def solver_line(solver: SolverInfo, hidden: float = 0.0) -> str:
    """`Solver: optimal, objective 12.3 ms, bound 12.3 ms, gap 0 % (highs)`.

    Args:
        hidden: share of the collectives of weights that takes no time in its figures.
    """
    text = f"Solver: {solver.status.replace('_', ' ')}, objective {duration(solver.objective)}"
    if solver.bound is not None:
        text += f", bound {duration(solver.bound)}"
    if solver.gap is not None:
        text += f", gap {100 * solver.gap:.3g} %"
    text += f" ({solver.backend})"
    if hidden:
        text += f", {hidden:.0%} of collectives of weights beside kernels"
    if solver.overruled is not None and solver.backend == BY_HAND:
        text += f": `{solver.overruled}`, since no plan that fits was found"
    elif solver.overruled is not None:
        text += f"; taken instead: the plan by hand `{solver.overruled}`, predicted no slower"
    return text


_RECOMPUTED = {
    "all": "all of {}",
    "attention": "all but attentions of {}",
    "products": "all but products and attentions of {}",
}


def remat_text(remat: str) -> str:
    """What the switch `remat:…` recomputes, in words."""
    parts = [part.partition("=") for part in remat.split(";") if remat != "none"]
    said = [_RECOMPUTED.get(level, "{}").format(runs.replace(",", ", ")) for level, _, runs in parts]
    return "; ".join(said) or "nothing"


def remat_lines(plan: Plan) -> list[str]:
    """What the backward pass recomputes in place of the program's own checkpoints, and what else was tried."""
    if plan.remat is None:
        return []
    lines, search = [f"Recomputed: {remat_text(plan.remat)}"], plan.remat_search
    if search is None:
        return [*lines, ""]
    if len(search.tried) == 1:
        return [f"{lines[0]}, since all fits", ""]
    if search.gap is not None:
        lines[0] += f"; whatever is recomputed, a step is at most {search.gap:.1%} shorter"
    rows: list[tuple[str, ...]] = [("", "step", "memory", "")]
    for each in sorted(search.tried, key=lambda each: each.step_time_s or math.inf):
        time = "-" if each.step_time_s is None else duration(each.step_time_s)
        memory = "-" if each.peak_memory_bytes is None else size(each.peak_memory_bytes)
        mark = " *" if each.remat == search.chosen else ""
        rows.append((remat_text(each.remat) + mark, time, memory, each.outcome if each.outcome != "planned" else ""))
    return [*lines, *("  " + line for line in columns(rows)), ""]


def region_lines(plan: Plan) -> list[str]:
    """How many attentions and experts are one op, and why others are written out; nothing where there are none."""
    lines = [line for what in ("attention", "experts") for line in _region_lines(what, plan.info.get(what, {}))]
    return [*lines, ""] if lines else []


def _region_lines(what: str, said: Mapping[str, Any]) -> list[str]:
    if not said:
        return []
    reasons: dict[str, list[str]] = {}
    for module, why in said["written_out"]:
        reasons.setdefault(why, []).append(module)
    count = sum(map(len, reasons.values()))
    lines = [f"{what.capitalize()}: {said['fused']} as one op, {count} written out"]
    for why, modules in reasons.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        lines.append(f"  {modules[0] or 'the model'}{more}: {why}")
    return lines


def replicated_lines(ops: Sequence[ReplicatedOp]) -> list[str]:
    """Ops without a rule, most expensive first; one line where there are none."""
    if not ops:
        return ["Every op has a sharding rule."]
    total = sum(each.cost_s for each in ops)
    lines = [f"Replicated for want of a rule: {len(ops)} ops, {duration(total)} of a step"]
    worst = sorted(ops, key=lambda each: -each.cost_s)
    for each in worst[:_SHOWN_OPS]:
        where = f" in {each.module}" if each.module else ""
        lines.append(f"  {each.op}{where}: {each.reason} ({duration(each.cost_s)})")
    if len(worst) > _SHOWN_OPS:
        lines.append(f"  and {len(worst) - _SHOWN_OPS} more")
    return lines


def duration(seconds: float) -> str:
    """`12.3 ms`; three significant digits in a suitable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.3g} ns"


def size(count: float) -> str:
    """`16 GB`, GB = 10^9 bytes."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} B"
