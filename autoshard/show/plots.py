"""Comparisons, sweeps and shardings as matplotlib figures (the extra `notebooks`).

Figures are made without pyplot: no display, no global state.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard import files
from autoshard.mesh import Mesh, Spec
from autoshard.plans.value import Plan, Predicted
from autoshard.show.drawing import holders, tiles
from autoshard.show.report import bytes_by_kind, layout, shortest_first, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
COMPUTE, COMMUNICATION, OVERLAPPED = "#4477AA", "#EE6677", "#222222"
KIND_COLORS: Mapping[str, str] = {
    "all-gather": "#4477AA",
    "all-reduce": "#EE6677",
    "reduce-scatter": "#228833",
    "all-to-all": "#CCBB44",
    "collective-permute": "#66CCEE",
}
"""Kind of collective -> colour (Paul Tol's bright scheme, safe for colour-blind readers)."""
OTHER_KIND = "#BBBBBB"
PART_COLORS = ("#4477AA", "#66CCEE", "#228833", "#CCBB44", "#EE6677", "#AA3377", "#BBBBBB", "#EE8866")
"""Colours of a tensor's shards, in turn."""
_LABELLED_PARTS = 64
_BESIDE = 6
"""Most names of plans that fit side by side."""
_FAR = 6
"""A limit more than this many times the highest bar is not drawn."""


def check_format(path: Path) -> None:
    """Raise ValueError unless a figure can be written to a file of that name."""
    if path.suffix.removeprefix(".").lower() not in FORMATS:
        raise ValueError(f"a figure is written as {', '.join(FORMATS)}: {path} ends otherwise")
    import matplotlib  # noqa: F401  (says early that it is missing)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all.

    Raises:
        ValueError: the name ends in no format that figures are written in.
        FileError: the file cannot be written.
    """
    check_format(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix(".").lower(), dpi=120)
    files.write(path, buffer.getvalue())


def plot_comparison(plans: Mapping[str, Predicted], limit: int | None, title: str, off: float = 0.0) -> Figure:
    """Step time by parts (a mark where those of weights overlap), MFU, bytes per collective, memory and limit.

    Args:
        off: bar of the step times (`autoshard/cost/machine/bars.py`).
    """
    names = list(plans)
    figure = _figure(9, 6)
    times, mfu, moved, memory = figure.subplots(2, 2).flat
    _step_times(times, plans, off)
    mfu.bar(names, [100 * figures.mfu for figures in plans.values()], color=COMPUTE)
    mfu.set_ylabel("MFU, %")
    _stacked_bytes(moved, plans)
    memory.bar(names, [figures.peak_memory_bytes / 1e9 for figures in plans.values()], color=COMPUTE)
    memory.set_ylabel("memory per device, GB")
    if limit is not None:
        _limit(memory, limit, max(figures.peak_memory_bytes for figures in plans.values()))
    for axes in (times, mfu, moved, memory):
        _plain(axes)
        if len(names) > _BESIDE:
            axes.tick_params(axis="x", labelrotation=45)
    figure.suptitle(title, fontsize=10)
    return figure


def _limit(axes: Axes, limit: int, most: int) -> None:
    """A line at the memory limit, or, where it would dwarf the bars, a note of its distance."""
    if limit > _FAR * most:
        axes.set_title(f"the limit of {size(limit)} is {limit / most:.0f} times the most that is used", fontsize=8)
        return
    axes.axhline(limit / 1e9, color=OVERLAPPED, linestyle="--", linewidth=1)
    axes.set_title(f"dashed: the limit of {size(limit)}", fontsize=8)


def _step_times(axes: Axes, plans: Mapping[str, Predicted], off: float) -> None:
    names = list(plans)
    compute = [1e3 * figures.compute_s for figures in plans.values()]
    axes.bar(names, compute, color=COMPUTE, label="compute")
    communication = [1e3 * figures.communication_s for figures in plans.values()]
    axes.bar(names, communication, bottom=compute, color=COMMUNICATION, label="communication")
    overlapped = [1e3 * figures.overlapped_s for figures in plans.values()]
    axes.plot(names, overlapped, "_", color=OVERLAPPED, markersize=18, markeredgewidth=1.5, label="with overlap")
    if off:
        below = [each * off / (1 + off) for each in overlapped]
        above = [each * off for each in overlapped]
        axes.errorbar(names, overlapped, (below, above), fmt="none", ecolor=OVERLAPPED, elinewidth=1, capsize=2)
    axes.set_ylabel("step time, ms")
    _legend_above(axes)


def _stacked_bytes(axes: Axes, plans: Mapping[str, Predicted]) -> None:
    names = list(plans)
    per_plan = [bytes_by_kind(figures) for figures in plans.values()]
    bottom = [0.0] * len(names)
    for kind in sorted({kind for moved in per_plan for kind in moved}):
        heights = [moved.get(kind, 0) / 1e9 for moved in per_plan]
        axes.bar(names, heights, bottom=bottom, color=KIND_COLORS.get(kind, OTHER_KIND), label=kind)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set_ylabel("collectives, GB per device")
    if any(bottom):
        _legend_above(axes)


def _legend_above(axes: Axes) -> None:
    """A legend above the bars."""
    axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.2)


def plot_sweep(
    comparisons: Mapping[float, Any],
    xlabel: str,
    *,
    of: Callable[[Predicted], float] = lambda figures: 1e3 * figures.step_time_s,
    ylabel: str = "step time, ms",
    log: bool = True,
) -> Figure:
    """One line per plan over batch sizes, devices…: `of` its prediction, open marks where it does not fit in memory.

    Args:
        comparisons: x -> the `autoshard.Comparison` there; plans may be missing in some.
    """
    from matplotlib.ticker import LogLocator

    figure = _figure(6, 3.6)
    axes = figure.subplots()
    names = dict.fromkeys(row.name for each in comparisons.values() for row in each.rows)
    for colour, name in zip(itertools.cycle(PART_COLORS), names, strict=False):
        points = [
            (x, of(row.predicted), each.memory is None or row.predicted.peak_memory_bytes <= each.memory)
            for x, each in comparisons.items()
            for row in each.rows
            if row.name == name
        ]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, linewidth=1.5, label=name)
        for x, y, fits in points:
            axes.plot(x, y, "o", color=colour, markersize=5, markerfacecolor=colour if fits else "white")
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(comparisons), [f"{x:g}" for x in comparisons])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)
    return figure


def plot_search(plan: Plan) -> Figure:
    """The mesh shapes that were tried, shortest predicted step first: bars, the chosen one full, and the proven bounds.

    Shapes without a bar were pruned by their bound; those with neither are left out.

    Raises:
        ValueError: the plan was made for one mesh, no others were tried.
    """
    if not plan.search:
        raise ValueError("no mesh shapes were tried: plan with devices=, without a mesh")
    tried = [each for each in shortest_first(plan.search) if each.step_time_s is not None or each.bound is not None]
    names = ["×".join(map(str, each.shape)) for each in tried]
    figure = _figure(max(5.0, 1 + 0.45 * len(tried)), 3.2)
    axes = figure.subplots()
    bars = axes.bar(names, [1e3 * (each.step_time_s or 0.0) for each in tried], color=COMPUTE, alpha=0.5)
    for bar, each in zip(bars, tried, strict=True):
        if each.shape == plan.mesh.shape:
            bar.set_alpha(1.0)
    bounds = [float("nan") if each.bound is None else 1e3 * each.bound for each in tried]
    axes.plot(names, bounds, "_", color=COMMUNICATION, markersize=14, markeredgewidth=2, label="no plan is below")
    axes.set_ylabel("step time, ms")
    _legend_above(axes)
    _plain(axes)
    axes.tick_params(axis="x", labelrotation=45)
    return figure


def plot_shardings(plan: Plan, names: Sequence[str]) -> Figure:
    """The shards of tensors of a plan, each with the devices that hold it.

    Args:
        names: of parameters, buffers, inputs or optimizer states.

    Raises:
        KeyError: the plan has no such tensor.
    """
    tensors = [(name, plan.tensor(name)) for name in names]
    across = min(4, max(1, len(tensors)))
    down = -(-len(tensors) // across)
    figure = _figure(2.6 * across, 2.1 * down)
    drawn = figure.subplots(down, across, squeeze=False).flat
    for axes, (name, tensor) in zip(drawn, tensors, strict=False):
        _tensor(axes, plan.mesh, tensor.spec)
        axes.set_title(f"{name}\n{'×'.join(map(str, tensor.shape))}  {layout(tensor.spec)}", fontsize=7)
    for axes in list(drawn)[len(tensors) :]:
        axes.set_axis_off()
    return figure


def _tensor(axes: Axes, mesh: Mesh, spec: Spec) -> None:
    from matplotlib.patches import Rectangle

    grid = tiles(spec, mesh)
    rows, columns = grid.ways
    numbers: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(grid.devices):
        for j, devices in enumerate(row):
            colour = PART_COLORS[numbers.setdefault(devices, len(numbers)) % len(PART_COLORS)]
            place = (j / columns, 1 - (i + 1) / rows)
            axes.add_patch(
                Rectangle(place, 1 / columns, 1 / rows, facecolor=colour, alpha=0.55, edgecolor="white", linewidth=1)
            )
            if rows * columns <= _LABELLED_PARTS:
                text = holders(devices, mesh.size)
                axes.text(place[0] + 0.5 / columns, place[1] + 0.5 / rows, text, ha="center", va="center", fontsize=6)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    rows_dim, columns_dim = ("" if dim is None else f"dim {dim}" for dim in grid.dims)
    axes.set_ylabel(rows_dim, fontsize=7)
    axes.set_xlabel(columns_dim, fontsize=7)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.yaxis.label.set_fontsize(9)
    axes.xaxis.label.set_fontsize(9)
