"""Calibrate a device kind: measure this machine (`measure.py`), fit the cost model, write a device file.

Non-negative least squares on relative errors, with Huber's weights against outliers, fits what `compute.py` and
`collectives.py` price with:

- launch: seconds = fixed + kernels x kernel_overhead
- matmul: seconds = fixed + FLOPs / rate, a rate per dtype
- memory: seconds = fixed + bytes / bandwidth
- collectives: seconds = collective_overhead + rounds x latency + factor x bytes / bandwidth, where rounds and factor
  are `collectives.coefficients` of a link with unit latency and bandwidth

The fitted rates are achieved ones, so the file has `achievable` = 1.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from autoshard import files, workers
from autoshard.cost.machine.collectives import CollectiveKind, coefficients
from autoshard.cost.machine.device import Device, DeviceError, Link, builtin_kinds, load_device
from autoshard.cost.machine.layout import standard_shape
from autoshard.cost.machine.targets import Target
from autoshard.errors import AutoshardError
from autoshard.mesh import Mesh

LEAST_POINTS = 3
"""Sizes that a rate needs: two make a line, the third tests it."""

_HUBER = 1.5
_FIT_ITERATIONS = 20

MEASURE_COMMAND = (sys.executable, "-P", "-m", "autoshard.cost.machine.measure")
"""The command that measures what the request file, its last argument, asks for."""


class CalibrationError(AutoshardError, ValueError):
    """Nothing could be measured, or no device fits the measurements."""


@dataclass(frozen=True)
class Point:
    """One measurement and the fitted model's value.

    Attributes:
        label: `matmul f32 512`, `all-reduce 4 x 65536 B`.
        measured, fitted: seconds.
        spread: of the repeats, relative (see `measure.timed`).
    """

    label: str
    measured: float
    fitted: float
    spread: float = 0.0

    @property
    def error(self) -> float:
        """(fitted - measured) / measured."""
        return (self.fitted - self.measured) / self.measured


@dataclass(frozen=True)
class Fit:
    """One fitted part of the model.

    Attributes:
        name: `launch`, `matmul`, `memory`, `collectives`.
        values: the fitted parameters, in seconds, FLOP/s or bytes/s.
        points: every measurement, in order.
    """

    name: str
    values: Mapping[str, float] = field(hash=False)
    points: tuple[Point, ...]

    @property
    def r2(self) -> float:
        """Coefficient of determination of the logarithms: 1 is perfect, 0 as good as their mean."""
        measured, fitted = (np.log([getattr(p, which) for p in self.points]) for which in ("measured", "fitted"))
        total = float(np.sum((measured - measured.mean()) ** 2))
        return 1 - float(np.sum((measured - fitted) ** 2)) / total if total else 1.0

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median([abs(point.error) for point in self.points]))

    @property
    def max_error(self) -> float:
        """Largest absolute relative error."""
        return max(abs(point.error) for point in self.points)

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.name}: {len(self.points)} points, R2 {self.r2:.3f}, relative error {self.median_error:.1%} in the "
            f"median, {self.max_error:.0%} at most"
        )


@dataclass(frozen=True)
class Calibration:
    """Measurements and fits.

    Attributes:
        device: the device kind as calibrated.
        fits: in the order launch, matmul, memory, collectives (with several devices).
        facts: `backend`, `version`, `device`, `platform`, `devices` as measured.
        base: the kind that all other fields come from, or the empty string.
        skipped: what the backend could not do, one text each.
    """

    device: Device
    fits: tuple[Fit, ...]
    facts: Mapping[str, Any] = field(hash=False)
    base: str = ""
    skipped: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "device": self.device.name,
            "base": self.base or None,
            "measured": dict(self.facts),
            "fits": {
                fit.name: {
                    "values": dict(fit.values),
                    "points": len(fit.points),
                    "r2": fit.r2,
                    "median_error": fit.median_error,
                    "max_error": fit.max_error,
                }
                for fit in self.fits
            },
            "skipped": list(self.skipped),
        }


# --- measuring ---------------------------------------------------------------------------------------------------


def measured(
    *,
    backend: Literal["auto", "jax", "torch"] = "auto",
    platform: Literal["cpu", "gpu", "tpu"] | None = None,
    devices: int | None = None,
    quick: bool = False,
    timeout: float = 3600.0,
    progress: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure the machine in a subprocess: (facts, points) as `measure.py` writes them.

    Args:
        platform: default the backend's preference.
        devices: virtual CPU devices, or how many of the devices to use; default all there are (one CPU device).
        progress: called with the name of each kind of point as it begins.

    Raises:
        CalibrationError: the backend is missing, or failed; with its output.
    """
    with files.work_folder(Path(tempfile.gettempdir()), "autoshard-measure-") as work:
        request = work / "request.json"
        asked = {"backend": backend, "platform": platform, "devices": devices, "quick": quick}
        request.write_text(json.dumps(asked))
        with open(work / "stderr.txt", "w+") as errors:
            command, variables = [*MEASURE_COMMAND, str(request)], {"TF_CPP_MIN_LOG_LEVEL": "3"}
            with workers.started(command, variables, stdout=subprocess.PIPE, stderr=errors) as process:
                assert process.stdout is not None
                lines = list(_said(process.stdout, progress or (lambda stage: None)))
                status = process.wait(timeout)
            if status != 0 or not lines:
                errors.seek(0)
                last = [line for line in errors.read().splitlines() if line.strip()] or ["it said nothing"]
                raise CalibrationError(f"measuring with {backend} failed: {last[-1].strip()[:500]}")
    facts, *points = lines
    return facts["facts"], points


def _said(stream: Any, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for line in stream:
        found = json.loads(line)
        if "what" in found:
            progress(f"measure {found.get('kind') or found['what']}")
        yield found


# --- fitting -----------------------------------------------------------------------------------------------------


def calibrate(
    facts: Mapping[str, Any], points: Sequence[Mapping[str, Any]], *, base: str | None = None, name: str | None = None
) -> Calibration:
    """Fit a device kind to the output of `measured`.

    Args:
        base: the kind that all unmeasured fields come from (links between hosts, memory, dtypes); default the
            built-in one of the same name as the device.
        name: of the new kind; default the base's, or the platform's, with `-measured`.

    Raises:
        CalibrationError: too few points, no positive rate that fits them, or no base for unmeasured fields.
    """
    known = base or _built_in(facts)
    start = load_device(known) if known else None
    if start is not None and start.topology:
        raise CalibrationError(f"base {base!r}: a kind without topology is needed, such as {start.kind}")
    kind = name or f"{start.name if start else facts['platform']}-measured"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", kind):
        raise CalibrationError(f"name {kind!r}: letters, digits, - and _ only")
    of: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        if "what" in point:
            of.setdefault(point["what"], []).append(point)
    launch = _launch(of.get("launch", []))
    matmul = _matmul(of.get("matmul", []))
    memory = _memory(of.get("memory", []))
    fits = [launch, matmul, memory]
    links, overhead = start.links if start else (), start.collective_overhead if start else 0.0
    if of.get("collective"):
        first = links[0] if links else Link("link", "switch", 1.0, 1e-6, 0)
        moved = _collectives(of["collective"], first, int(facts["devices"]), start)
        fits.append(moved)
        overhead = moved.values["collective_overhead"]
        own = replace(first, bandwidth=moved.values["bandwidth"], latency=moved.values["latency"], source=_words(facts))
        links = (own, *links[1:])
    if not links:
        raise CalibrationError(
            f"nothing is known of the links of {facts['device']!r}, and one device has none to measure: "
            "pass --base with the device kind that is nearest, such as h100"
        )
    rates = {dtype: rate for dtype, rate in matmul.values.items() if dtype != "fixed"}
    if "f32" not in rates:
        raise CalibrationError("products of f32 could not be measured, and every other dtype is held against them")
    device = Device(
        name=kind,
        target=start.target if start else cast(Target, facts["platform"]),
        flops=_rates(rates, start),
        memory_bandwidth=memory.values["bandwidth"],
        memory_bytes=facts.get("memory_bytes") or (start.memory_bytes if start else None),
        kernel_overhead=launch.values["kernel_overhead"],
        collective_overhead=overhead,
        achievable_compute=1.0,
        achievable_memory=1.0,
        links=links,
        multiprocessors=start.multiprocessors if start else 0,
        compute_capability=start.compute_capability if start else 0.0,
        chip_devices=start.chip_devices if start else 1,
        on_chip_bytes=start.on_chip_bytes if start else 0,
        cores=start.cores if start else 1,
        clock=start.clock if start else 0.0,
        usable_bytes=facts.get("usable_bytes") or (start.usable_bytes if start else None),
        source=_words(facts),
    )
    skipped = tuple(
        " ".join(str(point[key]) for key in ("skipped", "dtype", "op", "kind") if key in point) + f": {point['why']}"
        for point in points
        if "skipped" in point
    )
    return Calibration(device, tuple(fits), dict(facts), known or "", skipped)


def _rates(rates: Mapping[str, float], start: Device | None) -> dict[str, float]:
    """Measured FLOP/s per dtype; for other dtypes the base's rate times the achieved fraction of its f32 rate."""
    if start is None:
        return dict(rates)
    reached = rates["f32"] / start.flops["f32"]
    return {dtype: rates.get(dtype, peak * reached) for dtype, peak in {**start.flops, **rates}.items()}


def _built_in(facts: Mapping[str, Any]) -> str | None:
    """The built-in kind whose device name the backend reports (`NVIDIA H200`, `TPU v5 lite`), or None."""
    if facts["platform"] == "cpu":
        return "cpu"
    text = str(facts["device"]).lower()
    tpus = {"v4": "tpu-v4", "v5 lite": "tpu-v5e", "v5e": "tpu-v5e", "v6 lite": "tpu-v6e", "v6e": "tpu-v6e"}
    if facts["platform"] == "tpu":
        tpus |= {"v5p": "tpu-v5p", "v5": "tpu-v5p"}
        return next((kind for words, kind in tpus.items() if text.endswith(words)), None)
    if "a100" in text:
        return "a100-40gb" if "40gb" in text else "a100-80gb"
    return next((kind for kind in sorted(builtin_kinds()) if kind in text), None)


def _launch(points: Sequence[Mapping[str, Any]]) -> Fit:
    rows = np.array([[1.0, point["kernels"]] for point in points])
    solved = _solve("launch", rows, points, ["fixed", "kernel_overhead"], [f"launch {p['kernels']}" for p in points])
    return _fit("launch", solved, {"kernel_overhead": solved.x[1]})


def _matmul(points: Sequence[Mapping[str, Any]]) -> Fit:
    dtypes = list(dict.fromkeys(point["dtype"] for point in points))
    dtypes = [d for d in dtypes if sum(point["dtype"] == d for point in points) >= LEAST_POINTS]
    points = [point for point in points if point["dtype"] in dtypes]
    rows = np.array([[1.0, *(point["flops"] * (point["dtype"] == d) for d in dtypes)] for point in points])
    names = ["fixed", *(f"FLOP/s of {dtype}" for dtype in dtypes)]
    solved = _solve("matmul", rows, points, names, [f"matmul {p['dtype']} {p['size']}" for p in points])
    return _fit("matmul", solved, {dtype: 1 / solved.x[i + 1] for i, dtype in enumerate(dtypes)})


def _memory(points: Sequence[Mapping[str, Any]]) -> Fit:
    rows = np.array([[1.0, point["bytes"]] for point in points])
    labels = [f"{point['op']} {point['bytes']} B" for point in points]
    solved = _solve("memory", rows, points, ["fixed", "bandwidth"], labels)
    return _fit("memory", solved, {"bandwidth": 1 / solved.x[1]})


def _collectives(points: Sequence[Mapping[str, Any]], link: Link, devices: int, start: Device | None) -> Fit:
    """Overhead, latency and bandwidth of the innermost link, from concurrent groups of neighbours."""
    unit = replace(link, bandwidth=1.0, latency=0.0, island=0)
    if link.topology == "torus":
        unit = replace(unit, shape=standard_shape(devices, link.dims, start.chip_devices if start else 1))
    shell = Device("unit", "cpu", {"f32": 1.0}, 1.0, None, 0.0, 0.0, 1.0, 1.0, (unit,))
    if start is not None:
        shell = replace(shell, chip_devices=start.chip_devices)
    slow = replace(shell, links=(replace(unit, latency=1.0),))
    rows = []
    for point in points:
        mesh = Mesh((devices // point["group"], point["group"]), ("outer", "inner"))
        kind = cast(CollectiveKind, point["kind"])
        rounds = coefficients(kind, ("inner",), mesh, slow)[0]
        factor = coefficients(kind, ("inner",), mesh, shell)[1]
        rows.append([1.0, rounds, factor * point["bytes"]])
    labels = [f"{point['kind']} {point['group']} x {point['bytes']} B" for point in points]
    solved = _solve("collectives", np.array(rows), points, ["collective_overhead", "latency", "bandwidth"], labels)
    names = {"collective_overhead": solved.x[0], "latency": solved.x[1], "bandwidth": 1 / solved.x[2]}
    return _fit("collectives", solved, names)


@dataclass(frozen=True)
class _Solved:
    x: np.ndarray
    points: tuple[Point, ...]


def _fit(name: str, solved: _Solved, values: Mapping[str, float]) -> Fit:
    return Fit(name, {key: float(value) for key, value in values.items()}, solved.points)


def _solve(
    what: str,
    rows: np.ndarray,
    points: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    labels: Sequence[str],
) -> _Solved:
    """x >= 0 that minimises relative errors of rows @ x against the measured seconds; the last rates must be positive.

    Raises:
        CalibrationError: too few points, or a rate of 0.
    """
    if len(points) < max(LEAST_POINTS, rows.shape[1] if rows.ndim == 2 else 0):
        raise CalibrationError(
            f"too few points to fit {what}: {len(points)}, at least {max(LEAST_POINTS, len(names))} are needed; "
            "what could not be measured is named under `skipped` (--json)"
        )
    seconds = np.array([point["seconds"] for point in points])
    x = robust_nnls(rows / seconds[:, None])
    for value, name, column in zip(x, names, rows.T, strict=True):
        if value <= 0 and len(np.unique(column)) > 1 and name not in ("latency",):
            raise CalibrationError(
                f"what was measured of {what} fits no positive {name}: the time does not grow with the size; "
                "the machine is too noisy or the sizes are too small, try again without --quick"
            )
    fitted = rows @ x
    return _Solved(
        x,
        tuple(
            Point(label, float(t), float(f), float(point.get("spread", 0.0)))
            for label, t, f, point in zip(labels, seconds, fitted, points, strict=True)
        ),
    )


def robust_nnls(rows: np.ndarray) -> np.ndarray:
    """x >= 0 of shape (columns,) such that `rows` (points x columns) @ x is near 1, with Huber's weights."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    scaled = rows / scale
    weights = np.ones(len(rows))
    x = np.zeros(rows.shape[1])
    for _ in range(_FIT_ITERATIONS):
        found, _residual = nnls(scaled * weights[:, None], weights)
        left = np.abs(scaled @ found - 1)
        width = max(1.4826 * float(np.median(left)), 1e-12)
        new = np.sqrt(np.minimum(1.0, _HUBER * width / np.maximum(left, 1e-300)))
        if np.allclose(found, x, rtol=1e-9, atol=0) and np.allclose(new, weights, rtol=1e-6):
            break
        x, weights = found, new
    return np.asarray(found / scale)


# --- writing -----------------------------------------------------------------------------------------------------


def _words(facts: Mapping[str, Any]) -> str:
    devices = int(facts["devices"])
    count = "one device" if devices == 1 else f"{devices} devices at the same time"
    return f"measured by autoshard calibrate with {facts['backend']} {facts['version']} on {facts['device']}, {count}"


def to_toml(found: Calibration) -> str:
    """The device file: the kind, the fits and all points. Equal measurements give equal text."""
    device = found.device
    flops = ", ".join(f"{dtype} = {_number(rate)}" for dtype, rate in device.flops.items())
    lines = [f"# {device.source[0].upper()}{device.source[1:]}.", *(f"# {fit}." for fit in found.fits)]
    if found.base:
        lines.append(f"# What was not measured is from the kind {found.base}.")
    lines += [f"# Skipped: {_plain(text)}" for text in found.skipped]
    lines += ["", f"[{device.name}]", f'target = "{device.target}"', f"flops = {{ {flops} }}"]
    lines.append(f"memory_bandwidth = {_number(device.memory_bandwidth)}")
    for key in ("memory_bytes", "usable_bytes"):
        if getattr(device, key) is not None:
            lines.append(f"{key} = {getattr(device, key)}")
    for key in ("kernel_overhead", "collective_overhead"):
        lines.append(f"{key} = {_number(getattr(device, key))}")
    for key in ("multiprocessors", "compute_capability"):
        if getattr(device, key):
            lines.append(f"{key} = {getattr(device, key)}")
    for key, usual in (("chip_devices", 1), ("on_chip_bytes", 0), ("cores", 1), ("clock", 0.0)):
        if getattr(device, key) != usual:
            lines.append(f"{key} = {getattr(device, key)}")
    lines += ["achievable = { compute = 1.0, memory = 1.0 }", f"source = {_text(_source(found))}"]
    for link in device.links:
        lines += ["", f"[[{device.name}.links]]", f"name = {_text(link.name)}", f'topology = "{link.topology}"']
        lines += [f"bandwidth = {_number(link.bandwidth)}", f"latency = {_number(link.latency)}"]
        lines.append(f"island = {link.island}")
        if link.topology == "torus":
            lines += [f"dims = {link.dims}", f"wrap_multiple = {link.wrap_multiple}"]
            lines += ["wrap_whole = true"] * link.wrap_whole
        lines.append(f"source = {_text(link.source or 'unknown')}")
    lines += ["", "# point                                   measured s      fitted s   error  spread"]
    for fit in found.fits:
        for point in fit.points:
            figures = f"{point.measured:13.4e} {point.fitted:13.4e} {point.error:+7.1%} {point.spread:7.1%}"
            lines.append(f"# {point.label:38}{figures}")
    return "\n".join(lines) + "\n"


def _source(found: Calibration) -> str:
    return ". ".join([found.device.source, *map(str, found.fits)])


def _number(value: float) -> str:
    """Four significant digits, as a TOML float."""
    if not math.isfinite(value):
        raise DeviceError(f"{value} is no figure of a device")
    return f"{value:.3e}"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _text(value: str) -> str:
    """A TOML basic string."""
    return json.dumps(_plain(value), ensure_ascii=False)
