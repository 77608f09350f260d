"""Decompositions of ops that torch_xla computes on the CPU, mostly torch's own.

They apply wherever ops are numbered: during capture and while a plan runs, with and without torch_xla, so that the
sequence of ops is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from autoshard.frontends.tracing import algebra, fourier, quantized, special, writes
from autoshard.frontends.tracing.device import current

_DECOMPOSED_OPS = """
_upsample_nearest_exact1d _upsample_nearest_exact3d aminmax bucketize.Scalar bucketize.Tensor channel_shuffle col2im
fmax fmin glu_backward heaviside huber_loss im2col isin.Scalar_Tensor
isin.Tensor_Scalar isin.Tensor_Tensor linalg_cross logaddexp logaddexp2 logit_backward nansum
native_group_norm_backward native_layer_norm_backward renorm sinc
special_entr special_log_ndtr special_xlog1py tril_indices triu_indices unfold_backward
upsample_linear1d upsample_nearest1d upsample_nearest3d vdot
""".split()  # noqa: SIM905


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    found = {}
    for name in _DECOMPOSED_OPS:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        if op in decomposition_table:
            found[op] = decomposition_table[op]
    return found | {torch.ops.aten.unfold.default: _unfold, torch.ops.aten.unfold_copy.default: _unfold} | _own()


@cache
def _own() -> dict[Any, Callable[..., Any]]:
    """Our own decompositions; torch_xla's entry of some is no fallback but leads to one, or is wrong."""
    aten = torch.ops.aten
    return {
        aten.copy.default: writes.copied,
        aten._foreach_copy.default: writes.several_copied,
        aten.fill.Tensor: writes.copied,
        aten.median.default: algebra.median,
        aten.median.dim: algebra.median_dim,
        aten.searchsorted.Tensor: algebra.searchsorted,
        aten.searchsorted.Scalar: algebra.searchsorted,
        aten.logcumsumexp.default: algebra.logcumsumexp,
        aten.remainder.Scalar_Tensor: algebra.remainder_of_number,
        aten.cummin.default: algebra.cummin,
        aten.lgamma.default: special.lgamma,
        aten.digamma.default: special.digamma,
        aten.polygamma.default: special.polygamma,
        aten.hypot.default: special.hypot,
        aten.exp2.default: special.exp2,
        aten.signbit.default: special.signbit,
        aten.copysign.Tensor: special.copysign,
        aten.fake_quantize_per_tensor_affine_cachemask.default: quantized.per_tensor,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: quantized.by_tensors,
        aten.fake_quantize_per_channel_affine_cachemask.default: quantized.per_channel,
        aten._fused_moving_avg_obs_fq_helper_functional.default: quantized.observed,
        aten.diagonal_copy.default: algebra.diagonal,
        aten.diagonal_scatter.default: algebra.diagonal_scatter,
        aten.diagonal_backward.default: algebra.diagonal_backward,
        aten.as_strided.default: algebra.as_strided,
        aten.as_strided_copy.default: algebra.as_strided,
        aten.as_strided_scatter.default: algebra.as_strided_scatter,
        aten.masked_scatter_backward.default: algebra.masked_scatter_backward,
        aten.linalg_cholesky_ex.default: algebra.cholesky_ex,
        aten.cholesky_solve.default: algebra.cholesky_solve,
        aten.linalg_solve_triangular.default: algebra.solve_triangular,
        aten.huber_loss_backward.default: algebra.huber_loss_backward,
        aten._linalg_check_errors.default: lambda *_, **__: None,
        aten.view_as_complex.default: aten.view_as_complex_copy.default,
        aten.view_as_real.default: aten.view_as_real_copy.default,
        aten.complex.default: fourier.complex_of,
        aten.polar.default: fourier.polar,
        aten._fft_r2c.default: fourier.fft_r2c,
        aten._fft_c2c.default: fourier.fft_c2c,
        aten._fft_c2r.default: fourier.fft_c2r,
        aten.fft_fftfreq.default: fourier.fftfreq,
        aten.randperm.default: _permutation,
        aten.randperm.generator: _permutation,
        aten.addmv.default: _scaled(aten.mv.default),
        aten.addbmm.default: _scaled(_summed_products),
    }


def _unfold(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    """Windows of `size` elements of a dim, `step` apart, as a last dim, by a gather."""
    dim %= x.dim()
    count = (x.shape[dim] - size) // step + 1
    at = torch.arange(count, device=x.device).unsqueeze(-1) * step + torch.arange(size, device=x.device)
    taken = torch.index_select(x, dim, at.reshape(-1)).reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    return taken.movedim(dim + 1, -1)


def _permutation(n: int, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    """Argsort of random numbers; torch_xla's own slices by an index of one dim, which StableHLO lacks."""
    order = torch.rand(n, device=device).argsort()
    return order if dtype in (None, order.dtype) else order.to(dtype)


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """The decomposition of an overload, if the device needs it."""
    return _decomposition(op, current().type)


AVERAGES = frozenset({torch.ops.aten.mean.dim, torch.ops.aten.var.correction, torch.ops.aten.std.correction})
"""Reductions that torch_xla writes as a sum, a product with a constant, and a reshape to the kept dims.

Only the result of the reshape would be an annotated output. Propagation would shard the product, and spread through the
constant, which is merged with equal ones of the whole program: one split mean would gather all others.
"""

REDUCTIONS = AVERAGES | {
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.amax.default,
    torch.ops.aten.amin.default,
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten.var_mean.correction,
    torch.ops.aten.std_mean.correction,
}
"""Reductions over all dims by default. torch_xla 2.9 then reduces nothing: `x.amax()` is `x`."""


SLICES = {
    torch.ops.aten.slice_copy.Tensor,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.slice_backward.default,
}
"""Ops that begin or end at a position; torch_xla refuses one before the first."""

FACTORS = {
    torch.ops.aten.masked_fill.Scalar,
    torch.ops.aten.addcmul.default,
    torch.ops.aten.addcdiv.default,
}
"""Ops with a number of which torch_xla takes the real part alone."""

DIVISIONS = {
    torch.ops.aten.floor_divide.default,
    torch.ops.aten.floor_divide.Scalar,
    torch.ops.aten.div.Tensor_mode,
    torch.ops.aten.div.Scalar_mode,
}
"""Divisions to whole numbers; torch_xla divides float32, whose quotients of integers are off beyond 2^24."""

BY_ARGUMENTS = REDUCTIONS | SLICES | FACTORS | DIVISIONS | {
    torch.ops.aten.addmm.default, torch.ops.aten.cumsum.default, torch.ops.aten.div.Tensor,
    torch.ops.aten.scatter.src,
}  # fmt: skip
"""Ops decomposed for some of their arguments."""


def instead_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The decomposition of one of `BY_ARGUMENTS` for these arguments, or None."""
    if op in REDUCTIONS:
        return _reduced(op, args, kwargs)
    if op in SLICES:
        return _from_the_first(op, args, kwargs)
    if op is torch.ops.aten.div.Tensor:
        return _times_reciprocal if args[0].is_complex() else None
    if op is torch.ops.aten.cumsum.default:
        whole = not args[0].is_floating_point() and not args[0].is_complex()
        return _counted if whole and args[0].dtype != (kwargs.get("dtype") or torch.int64) else None
    if op in DIVISIONS:
        rounding = _argument(op, "rounding_mode", args, kwargs) if op._overloadname.endswith("mode") else "floor"
        wide = torch.result_type(*args[:2]) in (torch.int32, torch.int64)
        return partial(algebra.divided, rounding=rounding) if wide and rounding else None
    if op in FACTORS:
        value = _argument(op, "value", args, kwargs)
        return _OF_COMPLEX[op] if isinstance(value, complex) and value.imag else None
    if op is torch.ops.aten.scatter.src:
        return algebra.put if algebra.puts_one(*args, **kwargs) else None
    scales = (_argument(op, "beta", args, kwargs), _argument(op, "alpha", args, kwargs))
    return None if scales == (1, 1) else _scaled(torch.ops.aten.mm.default)


def _from_the_first(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """One of `SLICES` where it begins or ends before the first position: there, as in eager PyTorch."""
    shape = _argument(op, "input_sizes", args, kwargs) or args[0].shape
    size = shape[_argument(op, "dim", args, kwargs)]
    ends = {name: _argument(op, name, args, kwargs) for name in ("start", "end")}
    before = {name: 0 for name, end in ends.items() if isinstance(end, int) and end < -size}
    if not before:
        return None
    named = _named(op, args[1:], kwargs) | before
    return lambda x, *_, **__: op(x, **named)


def _times_reciprocal(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """A quotient of complex numbers, of which torch_xla says that it is real."""
    return torch.ops.aten.mul.Tensor(x, torch.ops.aten.reciprocal.default(divisor))


def _counted(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A cumulative sum of integers, which torch_xla takes in their own dtype."""
    return torch.ops.aten.cumsum.default(x.to(dtype or torch.int64), dim, dtype=dtype)


_OF_COMPLEX: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.masked_fill.Scalar: lambda x, mask, value: torch.where(mask, torch.full_like(x, value), x),
    torch.ops.aten.addcmul.default: lambda x, a, b, *, value: x + a * b * value,
    torch.ops.aten.addcdiv.default: lambda x, a, b, *, value: x + _times_reciprocal(a, b) * value,
}


def _scaled(product: Callable[..., Any]) -> Callable[..., Any]:
    """Decompose an op such as `addmm` with factors, which torch_xla computes on the CPU."""

    def made(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        found = product(a, b) if alpha == 1 else torch.ops.aten.mul.Tensor(product(a, b), alpha)
        return found if beta == 0 else torch.ops.aten.add.Tensor(found, x, alpha=beta)

    return made


def _summed_products(a: Any, b: Any) -> Any:
    return torch.ops.aten.sum.dim_IntList(torch.ops.aten.bmm.default(a, b), [0])


def _reduced(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The decomposition of one of `REDUCTIONS` for these arguments.

    One of `AVERAGES` with kept dims becomes one without, and a view. Missing dims become all dims.
    """
    if not args[0].dim():
        return None
    if op in AVERAGES and _argument(op, "keepdim", args, kwargs):
        return partial(_kept_apart, op)
    dims = _argument(op, "dim", args, kwargs)
    return partial(_of_all_dims, op) if dims is not None and not len(dims) else None


def _of_all_dims(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduction without dims, with all of them listed."""
    named = _named(op, args[1:], kwargs) | {"dim": list(range(args[0].dim()))}
    return op(args[0], **named)


def _named(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, behind its first."""
    return dict(zip([each.name for each in op._schema.arguments[1:]], args, strict=False)) | dict(kwargs)


def _argument(op: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An argument of an op by name: as given, else its default; None where the op has none of that name."""
    if name in kwargs:
        return kwargs[name]
    for place, each in enumerate(op._schema.arguments):
        if each.name == name:
            return args[place] if place < len(args) else each.default_value
    return None


def _kept_apart(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduction with kept dims as one without, and a view."""
    x, dims = args[0], _argument(op, "dim", args, kwargs)
    gone = sorted({d % x.dim() for d in dims} if dims else range(x.dim()))
    rest = _named(op, args[1:], kwargs) | {"dim": gone, "keepdim": False}
    made = op(x, **rest)
    kept = [1 if d in gone else n for d, n in enumerate(x.shape)]
    return torch.ops.aten.view_copy.default(made, kept)


@cache
def _decomposition(op: Any, device: str) -> Callable[..., Any] | None:
    return _table().get(op) if device != "xla" or op in _own() or current().falls_back(op.name()) else None


@cache
def functional_form(op: Any) -> Callable[..., Any] | None:
    """The functional form of an op that functionalization missed; None where it needs none.

    Functionalization runs above modes, so not for decompositions inside one. A view made there would be torch_xla's
    own, whose copies may read other elements (a copy of a permuted tensor).
    """
    if not op.name().startswith("aten::") or torch.Tag.view_copy in op.tags:
        return None
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose  # type: ignore[no-any-return]
    if not op.is_view:
        return None
    copied = getattr(torch.ops.aten, f"{op.overloadpacket.__name__}_copy", None)
    return getattr(copied, op._overloadname, None)
