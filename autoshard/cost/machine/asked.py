"""Seconds of one product, attention or collective, asked directly: `autoshard.estimate`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from autoshard.attention.form import Form
from autoshard.cost.machine import collectives, cycles
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import KIND_ALIASES, Device, load_device
from autoshard.cost.machine.fused_attention import Shape
from autoshard.cost.machine.layout import check_layout
from autoshard.cost.machine.measured import Measured, attention_seconds, measured, product_seconds
from autoshard.dtypes import dtype_bytes, is_dtype
from autoshard.errors import AutoshardError
from autoshard.mesh import Mesh

Level = Literal["measured", "compiler", "ratio", "datasheet"]

SPREAD = {"matmul": 2.0, "attention": 10.0, "collective": 2.2}
"""By which factor a datasheet's roofline may be off: nine of ten rows of A100, H100, H200 and B200 lie within."""
RATIO = 2.0
"""The same of models that are taken by datasheet ratios: an assumption, as nothing was measured there."""


class EstimateError(AutoshardError, ValueError):
    """A question that has no answer: what is missing, or wrong."""


@dataclass(frozen=True)
class Estimate:
    """How long one kernel or collective takes.

    Attributes:
        seconds: in all, with its launch.
        low, high: seconds between which nine of ten measurements, or estimates, lie, by errors on what was not fitted.
        level: `measured` (a model fitted to measured kernels of this kind), `compiler` (to the estimates of the kind's
            own compiler), `ratio` (measured ones, by datasheet ratios), `datasheet` (a roofline, the links' bandwidth).
        source: the same in words.
    """

    seconds: float
    low: float
    high: float
    level: Level
    source: str

    def __str__(self) -> str:
        """One line."""
        return f"{_time(self.seconds)} ({_time(self.low)} to {_time(self.high)}), {self.source}"


@dataclass(frozen=True)
class _Sizes:
    """What is asked, checked."""

    device: Device
    dtype: str
    given: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.given[name]


def estimate(device: str, op: str, *, dtype: str = "bf16", **sizes: Any) -> Estimate:
    """Seconds of one kernel or collective on a device kind.

    Args:
        device: `h100`, `tpu-v5e`, `h100:2x8`, or a file of your own.
        op: `matmul`, `attention`, or a collective such as `all-reduce`.
        dtype: of the operands.
        sizes: of a matmul [m, k] x [k, n] `m`, `k`, `n` and `batch` (1); of an attention `batch`, `seq`, `heads`,
            `kv_heads` (`heads`), `head_dim`, `window` (none), `causal` (True) and `backward` (False); of a collective
            `bytes`, the larger of operand and result per device, and `devices` (all of the topology).

    Raises:
        EstimateError: an unknown op, or a size that is missing, unknown or not positive.
        DeviceError: an unknown device kind, or one that does not hold so many devices.
    """
    if op not in _OPS:
        raise EstimateError(f"no op is called {op!r}{_near(op, _OPS)}; known are {', '.join(_OPS)}")
    if not is_dtype(dtype):
        raise EstimateError(f"no dtype is called {dtype!r}: write bf16, f16, f32, i8")
    kind = load_device(device)
    answer, wanted = _OPS[op]
    return answer(op, _Sizes(kind, dtype, _checked(op, sizes, wanted)))


# --- one answer per op ------------------------------------------------------------------------------------------


def _matmul(op: str, of: _Sizes) -> Estimate:
    batch, m, n, k = of.batch, of.m, of.n, of.k
    known = measured(of.device.measured)
    if known is None:
        moved = dtype_bytes(of.dtype) * batch * (m * k + k * n + m * n)
        model = cycles.model_of(of.device)
        if model is not None and of.dtype in ("bf16", "f32"):
            return _compilers(batch, m, n, k, moved, model, of)
        return _datasheet(roofline_seconds(2.0 * batch * m * n * k, moved, of.dtype, of.device), "matmul", of.device)
    beyond = max(m, n, k) > known.most["products"]
    row = "products-beyond" if beyond else "products-small" if m < 256 else "products-pairs"
    return _fitted(product_seconds(batch, m, n, k, of.dtype, of.device), of, known, row, "matmul", batch == 1)


def _attention(op: str, of: _Sizes) -> Estimate:
    batch, seq, heads, kv_heads, size = of.batch, of.seq, of.heads, of.kv_heads or of.heads, of.head_dim
    if heads % kv_heads:
        raise EstimateError(f"attention: {heads} heads cannot share {kv_heads} kv_heads: a multiple is needed")
    form = Form(1.0, of.causal, of.window or None)
    attended, ratio = form.attended(seq, seq), 2.5 if of.backward else 1.0
    known = measured(of.device.measured)
    if known is None:
        moved = dtype_bytes(of.dtype) * batch * seq * size * 2 * (heads + kv_heads)
        flops = 4.0 * batch * heads * attended * size
        return _datasheet(ratio * roofline_seconds(flops, moved, of.dtype, of.device), "attention", of.device)
    longest = seq if not of.window else min(seq, of.window * (1 if of.causal else 2))
    shape = Shape(batch, heads, kv_heads, seq, seq, size, attended, longest)
    row = "windows" if longest < seq else "short" if seq < 256 else "long"
    close = of.causal and not of.backward and size in known.attention and seq <= known.most["attention"]
    close = close and f"attention-{row}" in known.errors
    row = row if f"attention-{row}" in known.errors else "long"
    found = attention_seconds(shape, of.dtype, of.device)
    launch = known.of_head(size).launch
    return _fitted(launch + ratio * (found - launch), of, known, f"attention-{row}", "attention", close)


def _collective(op: str, of: _Sizes) -> Estimate:
    kind, total = cast(collectives.CollectiveKind, op), of.device.devices
    group = of.devices or total
    if not group:
        raise EstimateError(f"{op}: say between how many devices, or a topology such as {of.device.kind}:8")
    if total and total % group:
        raise EstimateError(f"{op}: groups of {group} do not make up the {total} devices of {of.device.name}")
    outer = total // group if total else 1
    mesh = Mesh((outer, group), ("outer", "inner"), device=of.device.name)
    check_layout(mesh)
    found = collectives.seconds(kind, ("inner",), of.bytes, mesh, of.device)
    known = measured(of.device.measured)
    if known is None or collectives.measured_curve(kind, ("inner",), mesh, of.device) is None:
        return _datasheet(found, "collective", of.device)
    row = "collectives-small" if of.bytes < 65536 else "collectives-large"
    return _fitted(found, of, known, row, "collective", group in known.collectives[op])


_PRODUCT = {"m": None, "k": None, "n": None, "batch": 1}
_HEADS = {"batch": None, "seq": None, "heads": None, "head_dim": None}
_ATTENTION = {**_HEADS, "kv_heads": 0, "window": 0, "causal": True, "backward": False}
_OPS: dict[str, tuple[Callable[[str, _Sizes], Estimate], Mapping[str, Any]]] = {
    "matmul": (_matmul, _PRODUCT),
    "attention": (_attention, _ATTENTION),
    **{kind: (_collective, {"bytes": None, "devices": 0}) for kind in get_args(collectives.CollectiveKind)},
}
"""Op -> how it is answered, and its sizes with their defaults; None: it must be given."""


# --- what they share --------------------------------------------------------------------------------------------


def _fitted(seconds: float, of: _Sizes, known: Measured, row: str, what: str, close: bool) -> Estimate:
    """By a fitted model; `close`: whether what it was fitted to includes such kernels."""
    base = of.device.measured
    same = of.device.kind in (base, KIND_ALIASES.get(base)) and (what == "collective" or of.dtype in ("bf16", "f16"))
    if not (close and same):
        source = f"by datasheet ratios from {what}s measured on {base}"
        return Estimate(seconds, seconds / RATIO, seconds * RATIO, "ratio", source)
    off = known.errors[row]["p90"]
    source = f"a model fitted to {what}s measured on {base}; {off:.0%} is the 90th percentile of its errors on others"
    return Estimate(seconds, seconds / (1 + off), seconds / (1 - min(off, 0.9)), "measured", source)


def _compilers(batch: int, m: int, n: int, k: int, moved: float, model: cycles.Model, of: _Sizes) -> Estimate:
    """Of one product whose operands and result are in device memory."""
    narrow = dtype_bytes(of.dtype) < 4
    done = cycles.Done((cycles.Products(batch, m, n, k, narrow, wide=0 if narrow else 2),))
    found, off = cycles.kernel_seconds(done, moved, model.constants, of.device), model.errors["products"]["p90"]
    source = f"a model fitted to estimates of libtpu {model.version}; {off:.0%} is the 90th percentile of its errors"
    return Estimate(found, found / (1 + off), found / (1 - min(off, 0.9)), "compiler", source)


def _datasheet(seconds: float, what: str, device: Device) -> Estimate:
    source = "datasheet bandwidth of the links" if what == "collective" else "datasheet roofline"
    spread = SPREAD[what]
    return Estimate(seconds, seconds / spread, seconds * spread, "datasheet", f"{source} of {device.kind}")


def _checked(op: str, sizes: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes with their defaults."""
    for name in sizes:
        if name not in wanted:
            raise EstimateError(f"{op} has no {name!r}{_near(name, wanted)}; it has {', '.join(wanted)}")
    given = {name: size for name, size in sizes.items() if size is not None}
    missing = [name for name, default in wanted.items() if default is None and name not in given]
    if missing:
        needed = [name for name, default in wanted.items() if default is None]
        raise EstimateError(f"{op} needs {', '.join(needed)}; not given: {', '.join(missing)}")
    for name, size in given.items():
        flag = isinstance(wanted[name], bool)
        if flag is not isinstance(size, bool):
            raise EstimateError(f"{op}: {name} must be {'true or false' if flag else 'a whole number'}, not {size!r}")
        if not flag and (not isinstance(size, int | float) or size != size // 1 or not 0 < size < 2**63):
            raise EstimateError(f"{op}: {name} must be a whole number greater than 0, not {size!r}")
    found = {**wanted, **given}
    return {name: value if isinstance(value, bool) else int(value) for name, value in found.items()}


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _time(seconds: float) -> str:
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("us", 1e-6))
    return f"{seconds / scale:.4g} {unit}"
