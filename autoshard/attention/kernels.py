"""What one device runs for its part of an attention: a fused kernel of its platform, or the attention written out.

| platform | kernel | for |
|---|---|---|
| TPU | jax's Pallas splash attention, padded to multiples of 128 | f32 and bf16; no bias |
| GPU | cuDNN's fused attention | f16 and bf16; features in multiples of 8 up to 256 (128 before Hopper); no segments |
| any | written out in f32 | all others |

A kernel is a jax function of the local operands, and of *extras*: constants that are split as queries are.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from autoshard.attention.form import FORWARD, Form
from autoshard.program import TensorType
from autoshard.regions.kernel import Extras, Kernel, Platform, stablehlo_of

_BLOCKS = (512, 256, 128)
"""Rows of a block of queries and of keys in a TPU's kernel, the first that divides them."""


@dataclass(frozen=True)
class Part:
    """One device's part of an attention or of its gradient.

    Attributes:
        kind, form: of the op.
        operands: local types, in its order.
        queries: global number of queries.
        shards: over how many devices queries are split, contiguously.
        device: kind of device, such as `h100`.
    """

    kind: str
    form: Form
    operands: tuple[TensorType, ...]
    queries: int
    shards: int
    platform: Platform
    device: str = ""

    @property
    def keys(self) -> int:
        """Number of keys, of which every device has all."""
        return self.operands[1].shape[2]


def kernel_name(part: Part) -> tuple[str, str]:
    """(name of the fused kernel that computes a part, or empty; why there is none)."""
    (*_, rows, features), dtype = part.operands[0].shape, part.operands[0].dtype
    values = part.operands[2].shape[-1]
    form = part.form
    if part.platform == "tpu":
        if dtype not in ("f32", "bf16"):
            return "", f"splash attention has no {dtype}"
        if form.bias:
            return "", "splash attention takes no bias"
        if rows % _BLOCKS[-1] and part.shards > 1 and (form.causal or form.window is not None):
            return "", f"{rows} queries a device: splash attention splits those that are masked in multiples of 128"
        return "splash attention", ""
    if part.platform == "gpu":
        most = 128 if part.device.startswith(("a100", "v100")) else 256
        if dtype not in ("f16", "bf16"):
            return "", f"cuDNN's attention has no {dtype}"
        if form.soft_cap is not None:
            return "", "cuDNN's attention has no soft cap of the scores"
        if form.segments:
            return "", "segments are not translated for cuDNN's attention"
        if form.window is not None and (not form.causal or part.shards > 1):
            return "", "cuDNN's attention has causal windows only, of whole sequences"
        if max(features, values) > most or features % 8 or values % 8:
            return "", f"cuDNN's attention takes features in multiples of 8 up to {most}, not {features} and {values}"
        return "cuDNN", ""
    return "", "there is no fused kernel for CPUs"


@cache
def lowered(part: Part) -> Kernel:
    """The kernel of a part as StableHLO."""
    name, why = kernel_name(part)
    make = {"splash attention": _splash, "cuDNN": _cudnn}.get(name, _written_out)
    function, extras = make(part)
    entry = f"{part.kind}_{hashlib.sha256(repr(part).encode()).hexdigest()[:12]}"
    text = stablehlo_of(function, part.operands, extras, part.shards, part.platform, entry)
    if name == "splash attention":
        text = _costed(text, part)
    return Kernel(name, why, entry, text, extras)


_PRODUCTS = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}
"""Of each Pallas kernel the products over features of keys and of values."""
BACKWARD_PRODUCTS: Mapping[str, tuple[int, int]] = {"tpu": (4, 3)}
"""Platform -> products of the gradient, where they are not `(3, 2)`: scores computed twice."""


def _costed(text: str, part: Part) -> str:
    """The module with the FLOP of its Pallas kernels, which XLA's scheduler and cost analysis cannot see inside."""
    (*heads, _, features), values = part.operands[0].shape, part.operands[2].shape[-1]
    pairs = (
        math.prod(heads) * part.form.attended(part.queries, part.keys) / part.shards * part.form.unbalanced(part.shards)
    )
    lines = []
    text = re.sub(r'mhlo\.frontend_attributes = \{kernel_metadata = "[^"]*"\}, ', "", text)  # of several lines in HLO
    for line in text.splitlines(keepends=True):
        named = re.search(r'kernel_name = "splash_\w+?_(fwd|dkv|dq)', line)
        if named is not None:
            of_keys, of_values = _PRODUCTS[named[1]]
            flops = round(2 * pairs * (of_keys * features + of_values * values))
            costs = (("flops", flops), ("transcendentals", round(pairs)), ("bytes_accessed", 0))
            said = ", ".join(f"\\22{what}\\22: {amount}" for what, amount in costs)
            said = f"\\22cost_estimate\\22: {{{said}}}, "
            line = line.replace("\\22serialization_format", said + "\\22serialization_format", 1)
        lines.append(line)
    return "".join(lines)


Function = Callable[..., Sequence[Any]]


def _split(part: Part, operands: Sequence[Any]) -> tuple[Any, ...]:
    """(q, k, v, bias, segments, out, lse, grad), None for what is absent."""
    rest = list(operands[3:])
    bias = rest.pop(0) if part.form.bias else None
    segments = (rest.pop(0), rest.pop(0)) if part.form.segments else None
    return (*operands[:3], bias, segments, *(rest[:3] if part.kind != FORWARD else (None,) * 3))


# ---- written out ---------------------------------------------------------------------------------------------------


def _written_out(part: Part) -> tuple[Function, Extras]:
    """In f32 (f64 where q is), with all scores at once."""
    import jax.numpy as jnp

    form = part.form
    masks_rows = form.causal or form.window is not None
    extras: Extras = ((np.arange(part.queries, dtype=np.int32), 0),) if masks_rows else ()

    def scores(q: Any, k: Any, bias: Any, segments: Any, rows: Any) -> Any:
        found = capped = jnp.einsum("bkgsd,bktd->bkgst", q * form.scale, k)
        if form.soft_cap is not None:
            found = capped = form.soft_cap * jnp.tanh(capped / form.soft_cap)
        allowed = None
        if masks_rows:
            apart = rows[:, None] - jnp.arange(k.shape[2], dtype=jnp.int32)
            allowed = apart >= 0 if form.window is None or form.causal else apart > -form.window
            if form.window is not None:
                allowed = allowed & (apart < form.window)
        if segments is not None:
            own = segments[0][:, None, None, :, None] == segments[1][:, None, None, None, :]
            allowed = own if allowed is None else allowed & own
        found = found if allowed is None else jnp.where(allowed, found, -jnp.inf)
        return found if bias is None else found + bias, capped

    def run(*given: Any) -> Sequence[Any]:
        operands, rows = given[: len(part.operands)], given[-1]
        q, k, v, bias, segments, out, lse, grad = _split(part, operands)
        wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        wq, wk, wv = (each.astype(wide) for each in (q, k, v))
        found, capped = scores(wq, wk, None if bias is None else bias.astype(wide), segments, rows)
        if part.kind == FORWARD:
            highest = found.max(-1, keepdims=True)
            highest = jnp.where(highest == -jnp.inf, 0.0, highest)
            weights = jnp.exp(found - highest)
            total = weights.sum(-1, keepdims=True)
            made = jnp.einsum("bkgst,bkte->bkgse", weights / jnp.where(total == 0, 1.0, total), wv)
            return made.astype(q.dtype), (highest + jnp.log(total))[..., 0].astype(jnp.float32)
        lse = lse.astype(wide)[..., None]
        weights = jnp.exp(found - jnp.where(lse == -jnp.inf, 0.0, lse))
        grad, out = grad.astype(wide), out.astype(wide)
        delta = (grad * out).sum(-1, keepdims=True)
        slopes = weights * (jnp.einsum("bkgse,bkte->bkgst", grad, wv) - delta) * form.scale
        if form.soft_cap is not None:
            slopes = slopes * (1 - (capped / form.soft_cap) ** 2)
        dq = jnp.einsum("bkgst,bktd->bkgsd", slopes, wk)
        dk = jnp.einsum("bkgst,bkgsd->bktd", slopes, wq)
        dv = jnp.einsum("bkgst,bkgse->bkte", weights, grad)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    return run, extras


# ---- TPU: splash attention -----------------------------------------------------------------------------------------


def _splash(part: Part, interpret: bool = False) -> tuple[Function, Extras]:
    """jax's Pallas kernel, forward or backward; a batch of one at a time is one grid."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    form, (_, kv_heads, group, rows, _) = part.form, part.operands[0].shape
    more, more_keys = -rows % _BLOCKS[-1], -part.keys % _BLOCKS[-1]
    of_queries, of_keys = (next(n for n in _BLOCKS if size % n == 0) for size in (rows + more, part.keys + more_keys))
    blocks = splash.BlockSizes(
        block_q=of_queries, block_kv=of_keys, block_kv_compute=of_keys, block_q_dkv=of_queries, block_kv_dkv=of_keys,
        block_kv_dkv_compute=of_keys, block_q_dq=of_queries, block_kv_dq=of_keys,
    )  # fmt: skip
    shape = (part.queries + more, part.keys + more_keys)
    if form.window is not None:
        after = 0 if form.causal else form.window - 1
        mask: Any = masks.LocalMask(shape, (form.window - 1, after), 0, shard_count=part.shards)
    elif form.causal:
        mask = masks.CausalMask(shape, shard_count=part.shards)
    else:  # the same on every device
        mask = masks.FullMask((rows + more, part.keys + more_keys))
    split = part.shards if form.causal or form.window is not None else 1
    with jax.ensure_compile_time_eval():
        made = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * (kv_heads * group)), head_shards=1, q_seq_shards=split,
            block_sizes=blocks, interpret=interpret, attn_logits_soft_cap=form.soft_cap,
        )  # fmt: skip
    leaves, structure = jax.tree.flatten(made)
    dims = _query_dims(made)
    extras = tuple(
        (np.asarray(leaf), dim if dim >= 0 and split > 1 else None) for leaf, dim in zip(leaves, dims, strict=True)
    )
    settings = made.kwargs
    static = {name: settings[name] for name in ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name",
              "mask_function", "attn_logits_soft_cap")}  # fmt: skip

    def run(*given: Any) -> Sequence[Any]:
        operands, local = given[: len(part.operands)], given[len(part.operands) :]
        kernel = jax.tree.unflatten(structure, local)
        q, k, v, _, segments, out, lse, grad = _split(part, operands)
        if more or more_keys:  # a segment of their own
            none = [jnp.zeros((q.shape[0], size), jnp.int32) for size in (rows, part.keys)]
            segments = tuple(
                jnp.pad(each, ((0, 0), (0, count)), constant_values=-1)
                for each, count in zip(segments or none, (more, more_keys), strict=True)
            )
            k, v = (jnp.pad(each, ((0, 0), (0, 0), (0, more_keys), (0, 0))) for each in (k, v))
        ids = None if segments is None else splash.SegmentIds(*segments)

        def flat(x: Any) -> Any:
            x = x.reshape(x.shape[0], kv_heads * group, *x.shape[3:])
            return jnp.pad(x, ((0, 0), (0, 0), (0, more), *[(0, 0)] * (x.ndim - 3))) if more else x

        scaled = flat(q) * jnp.asarray(form.scale, q.dtype)
        if part.kind == FORWARD:

            def forward(q: Any, k: Any, v: Any, ids: Any) -> Any:
                made, (lse,) = splash._splash_attention_forward(
                    kernel.fwd_mask_info, q, k, v, ids, None, save_residuals=True, interpret=interpret, **static
                )
                return made, lse

            made, stats = jax.vmap(forward, in_axes=(0, 0, 0, None if ids is None else 0))(scaled, k, v, ids)
            return made[:, :, :rows].reshape(*q.shape[:-1], v.shape[-1]), stats[:, :, :rows].reshape(q.shape[:-1])

        def backward(q: Any, k: Any, v: Any, ids: Any, out: Any, lse: Any, grad: Any) -> Any:
            saved = (q, k, v, ids, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
            found = splash._splash_attention_bwd(
                False, static["mask_value"], static["is_mqa"], static["block_sizes"], None, static["mask_function"],
                form.soft_cap, interpret, saved, grad,
            )  # fmt: skip
            return found[3:6]

        over = (0, 0, 0, None if ids is None else 0, 0, 0, 0)
        dq, dk, dv = jax.vmap(backward, in_axes=over)(scaled, k, v, ids, flat(out), flat(lse), flat(grad))
        dq = (dq * jnp.asarray(form.scale, dq.dtype))[:, :, :rows].reshape(q.shape)
        return dq, dk[:, :, : part.keys], dv[:, :, : part.keys]

    return run, extras


def _query_dims(kernel: Any) -> Any:
    """Per array of a splash kernel the dim that is split as queries are, -1 for none."""
    import jax

    def dims(info: Any) -> Any:
        if info is None:
            return None
        named = {"data_next": 1, "mask_next": 1, "block_mask": 1, "partial_mask_blocks": -1, "q_sequence": 0}
        return type(info)(*(None if getattr(info, name) is None else named[name] for name in info._fields))

    return jax.tree.leaves([dims(kernel.fwd_mask_info), dims(kernel.dq_mask_info), dims(kernel.dkv_mask_info)])


# ---- GPU: cuDNN ----------------------------------------------------------------------------------------------------


def _cudnn(part: Part) -> tuple[Function, Extras]:
    """cuDNN's fused attention; causal parts of split queries are earlier keys and the diagonal, put together."""
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo as fused

    form, rows = part.form, part.operands[0].shape[3]
    split = form.causal and part.shards > 1
    extras: Extras = ((np.arange(part.shards, dtype=np.int32) * rows, 0),) if split else ()

    def attend(mask: Any, operands: Sequence[Any], bias: Any, lengths: Any) -> Any:
        """Forward of (q, k, v), or backward of (q, k, v, lse, out, grad)."""
        none = jnp.zeros(0, operands[0].dtype)
        options = {
            "scale": form.scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (bias is not None, False),
            "mask_type": mask, "layout": fused.AttentionLayout.BNTH.value, "sliding_window_length": form.window,
        }  # fmt: skip
        q, k, v, *saved = operands
        masked = (none if bias is None else bias, *(lengths or (none, none)), none, none, none, none)
        if not saved:
            return fused._dot_product_attention_fwd_impl(q, k, v, *masked, **options, is_training=True)
        return fused._dot_product_attention_bwd_impl(q, k, v, *masked, *saved, **options)

    def run(*given: Any) -> Sequence[Any]:
        q, k, v, bias, _, out, lse, grad = _split(part, given[: len(part.operands)])
        batch, kv_heads, group = q.shape[:3]

        def flat(x: Any) -> Any:
            return x.reshape(batch, kv_heads * group, *x.shape[3:])

        if bias is not None:
            shape = (bias.shape[0], *(kv_heads, group) * (bias.shape[1] * bias.shape[2] > 1), rows, part.keys)
            shape = shape if len(shape) == 5 else (shape[0], 1, 1, rows, part.keys)
            bias = jnp.broadcast_to(bias, shape).reshape(shape[0], -1, rows, part.keys).astype(q.dtype)
        operands = (flat(q), k, v) if part.kind == FORWARD else (flat(q), k, v, flat(lse), flat(out), flat(grad))
        if not split:
            mask = fused.MaskType.CAUSAL if form.causal else fused.MaskType.NO_MASK
            found = attend(mask, operands, bias, None)
        else:
            found = parts(operands, bias, given[-1][0])
        if part.kind == FORWARD:
            return found[0].reshape(*q.shape[:-1], v.shape[-1]), found[1].reshape(q.shape[:-1])
        return found[0].reshape(q.shape), found[1], found[2]

    def parts(operands: Sequence[Any], bias: Any, first: Any) -> Sequence[Any]:
        """The keys before this device's first query, all of them seen, and those at its queries."""
        from jax import lax

        q, k, v, *saved = operands
        here = [lax.dynamic_slice_in_dim(each, first, rows, 2) for each in (k, v)]
        bias_here = None if bias is None else lax.dynamic_slice_in_dim(bias, first, rows, 3)
        before = jnp.full((q.shape[0],), jnp.maximum(first, 1), jnp.int32)
        lengths = (jnp.full((q.shape[0],), rows, jnp.int32), before)
        one = attend(fused.MaskType.CAUSAL, (q, *here, *saved), bias_here, None)
        other = attend(fused.MaskType.PADDING, (q, k, v, *saved), bias, lengths)
        if not saved:
            stats = jnp.where(first > 0, other[1], -jnp.inf)
            total = jnp.logaddexp(one[1], stats)
            made = sum(
                jnp.where(jnp.isfinite(lse), jnp.exp(lse - total), 0.0)[..., None] * out.astype(jnp.float32)
                for out, lse in ((one[0], one[1]), (other[0], stats))
            )
            return made.astype(q.dtype), total
        dq, dk, dv = (jnp.where(first > 0, each, 0) for each in other)
        dk, dv = (
            lax.dynamic_update_slice_in_dim(whole, lax.dynamic_slice_in_dim(whole, first, rows, 2) + own, first, 2)
            for whole, own in ((dk, one[1]), (dv, one[2]))
        )
        return dq + one[0], dk, dv

    return run, extras
