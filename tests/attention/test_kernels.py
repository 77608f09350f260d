"""Kernels of one device's part of an attention, against PyTorch's own."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from autoshard.attention import kernels
from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.attention.kernels import Part
from autoshard.frontends.tracing import attention as ops
from autoshard.program import TensorType

SIZES = st.sampled_from((1, 2, 3))


def part(kind: str, form: Form, q, k, v, shards: int = 1, platform: str = "cpu", device: str = "") -> Part:
    """The part of one device of `shards`, whose queries are `q`."""
    types = [TensorType(tuple(t.shape), "f32") for t in (q, k, v)]
    batch, kv_heads, group, rows, _ = q.shape
    if form.bias:
        types.append(TensorType((batch, 1, 1, rows, k.shape[2]), "f32"))
    if form.segments:
        types += [TensorType((batch, rows), "i32"), TensorType((batch, k.shape[2]), "i32")]
    if kind == GRADIENT:
        out = TensorType((batch, kv_heads, group, rows, v.shape[-1]), "f32")
        types += [out, TensorType(out.shape[:-1], "f32"), out]
    return Part(kind, form, tuple(types), rows * shards, shards, platform, device)


def reference(q, k, v, form: Form, bias=None, segments=None):
    """Output and gradients by `F.scaled_dot_product_attention`, masks written out."""
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    rows, columns = torch.arange(q.shape[3]).unsqueeze(1), torch.arange(k.shape[2])
    allowed = torch.ones(q.shape[3], k.shape[2], dtype=torch.bool)
    if form.causal:
        allowed &= columns <= rows
    if form.window is not None:
        allowed &= (rows - columns).abs() < form.window
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
    mask = mask if bias is None else mask + bias
    if segments is not None:
        mask = mask.masked_fill((segments[0].unsqueeze(2) != segments[1].unsqueeze(1))[:, None, None], -math.inf)
    if form.soft_cap is None:
        out = functional.scaled_dot_product_attention(q, k.unsqueeze(2), v.unsqueeze(2), mask, scale=form.scale)
    else:
        capped = form.soft_cap * torch.tanh(q @ k.unsqueeze(2).mT * form.scale / form.soft_cap)
        out = (capped + mask).softmax(-1) @ v.unsqueeze(2)
    grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return out.detach(), grad, torch.autograd.grad(out, (q, k, v), grad)


def tensors(batch=1, kv_heads=2, group=2, queries=8, keys=8, features=4, values=4):
    shapes = (batch, kv_heads, group, queries, features), (batch, kv_heads, keys, features)
    return [torch.randn(shape) for shape in (*shapes, (batch, kv_heads, keys, values))]


@settings(deadline=None)
@given(
    st.booleans(), st.sampled_from((None, 1, 3)), st.booleans(), st.booleans(), SIZES, SIZES,
    st.sampled_from(((8, 8), (4, 8), (8, 4))), st.sampled_from((None, 0.5)),
)  # fmt: skip
def test_written_out_as_pytorch_computes_it(causal, window, biased, packed, batch, group, lengths, soft_cap):
    queries, keys = lengths
    # A query that attends to nothing is NaN in PyTorch.
    window = None if queries > keys else window
    packed = packed and queries == keys
    torch.manual_seed(0)
    q, k, v = tensors(batch, 2, group, queries, keys, 4, 3)
    form = Form(0.3, causal, window, biased, packed, soft_cap)
    bias = torch.randn(batch, 1, 1, queries, keys) if biased else None
    ids = torch.arange(queries, dtype=torch.int32).expand(batch, -1) // 4
    segments = (ids, ids) if packed else None
    out, grad, gradients = reference(q, k, v, form, bias, segments)
    masks = [each for each in (bias, *(segments or ())) if each is not None]
    forward, extras = kernels._written_out(part(FORWARD, form, q, k, v))
    rows = [array for array, _ in extras]
    given = [t.numpy() for t in (q, k, v, *masks)]
    made, lse = forward(*given, *rows)
    np.testing.assert_allclose(made, out, rtol=2e-5, atol=2e-5)
    backward, _ = kernels._written_out(part(GRADIENT, form, q, k, v))
    for found, wanted in zip(backward(*given, made, lse, grad.numpy(), *rows), gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)
    torch_made, _ = ops.attention(q, k, v, form, bias, segments)
    torch.testing.assert_close(torch_made, out, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_the_torch_ops_differentiate_as_pytorch_does(soft_cap):
    torch.manual_seed(0)
    q, k, v = tensors()
    form = Form(0.5, causal=True, soft_cap=soft_cap)
    _, grad, wanted = reference(q, k, v, form)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    found = torch.autograd.grad(ops.attention(*leaves, form)[0], leaves, grad)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 96), (False, 200)])
@pytest.mark.parametrize(("packed", "soft_cap"), [(False, None), (True, None), (False, 2.0)])
def test_splash_attention_computes_each_part_of_split_queries(causal, window, packed, soft_cap):
    torch.manual_seed(0)
    q, k, v = tensors(1, 1, 2, 512, 512, 64, 64)
    form, shards = Form(0.25, causal, window, segments=packed, soft_cap=soft_cap), 2
    ids = torch.arange(512, dtype=torch.int32).unsqueeze(0) // 200
    segments = (ids, ids) if packed else None
    out, grad, gradients = reference(q, k, v, form, None, segments)
    summed = [torch.zeros_like(k), torch.zeros_like(v)]
    for shard in range(shards):
        mine = slice(shard * 256, shard * 256 + 256)
        masks = [ids[:, mine].numpy(), ids.numpy()] if packed else []
        local = q[..., mine, :]
        runs = [kernels._splash(part(kind, form, local, k, v, shards, "tpu"), True) for kind in (FORWARD, GRADIENT)]
        of_shard = [
            [array if dim is None else np.split(array, shards, dim)[shard] for array, dim in extras]
            for _, extras in runs
        ]
        given = [local.numpy(), k.numpy(), v.numpy(), *masks]
        made, lse = runs[0][0](*given, *of_shard[0])
        np.testing.assert_allclose(made, out[..., mine, :], rtol=2e-3, atol=2e-3)
        dq, dk, dv = runs[1][0](*given, made, lse, grad[..., mine, :].numpy(), *of_shard[1])
        np.testing.assert_allclose(dq, gradients[0][..., mine, :], rtol=5e-3, atol=5e-3)
        summed = [total + torch.tensor(np.asarray(each)) for total, each in zip(summed, (dk, dv), strict=True)]
    for found, wanted in zip(summed, gradients[1:], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=5e-3, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(130, 130), (128, 77), (50, 300)])
def test_splash_attention_pads_what_is_no_multiple_of_its_blocks(causal, queries, keys):
    torch.manual_seed(0)
    q, k, v = tensors(2, 1, 2, queries, keys, 64, 64)
    form = Form(0.25, causal)
    out, grad, gradients = reference(q, k, v, form)
    (forward, extras), (backward, more) = (
        kernels._splash(part(kind, form, q, k, v, 1, "tpu"), True) for kind in (FORWARD, GRADIENT)
    )
    given = [t.numpy() for t in (q, k, v)]
    made, lse = forward(*given, *(array for array, _ in extras))
    np.testing.assert_allclose(made, out, rtol=2e-3, atol=2e-3)
    found = backward(*given, made, lse, grad.numpy(), *(array for array, _ in more))
    for each, wanted in zip(found, gradients, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=5e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("form", "dtype", "platform", "device", "rows", "features", "said"),
    [
        (Form(1.0), "bf16", "tpu", "tpu-v5e", 256, 64, ""),
        (Form(1.0), "f32", "tpu", "tpu-v5e", 256, 64, ""),
        (Form(1.0, bias=True), "bf16", "tpu", "tpu-v5e", 256, 64, "splash attention takes no bias"),
        (Form(1.0), "bf16", "tpu", "tpu-v5e", 200, 64, ""),
        (Form(1.0), "f16", "tpu", "tpu-v5e", 256, 64, "splash attention has no f16"),
        (Form(1.0, bias=True), "bf16", "gpu", "h100", 200, 64, ""),
        (Form(1.0), "f32", "gpu", "h100", 256, 64, "cuDNN's attention has no f32"),
        (Form(1.0), "bf16", "gpu", "h100", 256, 256, ""),
        (Form(1.0), "bf16", "gpu", "a100", 256, 256, "in multiples of 8 up to 128, not 256"),
        (Form(1.0), "bf16", "gpu", "h100", 256, 36, "in multiples of 8 up to 256, not 36"),
        (Form(1.0, segments=True), "bf16", "gpu", "h100", 256, 64, "segments are not translated"),
        (Form(1.0, soft_cap=9.0), "bf16", "gpu", "h100", 256, 64, "no soft cap"),
        (Form(1.0, window=9), "bf16", "gpu", "h100", 256, 64, "causal windows only"),
        (Form(1.0), "bf16", "cpu", "cpu", 256, 64, "no fused kernel for CPUs"),
    ],
)
def test_which_kernel_a_part_has(form, dtype, platform, device, rows, features, said):
    shapes = (1, 2, 2, rows, features), (1, 2, rows, features), (1, 2, rows, features)
    made = Part(FORWARD, form, tuple(TensorType(shape, dtype) for shape in shapes), rows, 1, platform, device)
    name, why = kernels.kernel_name(made)
    assert (said in why) if said else (name and not why)


@pytest.mark.parametrize("kind", [FORWARD, GRADIENT])
def test_functions_are_named_by_what_they_compute(kind):
    q, k, v = tensors(1, 1, 2, 256, 512, 64, 64)
    split = part(kind, Form(1.0, causal=True), q, k, v, 2, "tpu", "tpu-v5e")
    first, other = kernels.lowered(split), kernels.lowered(part(kind, Form(1.0), q, k, v, 2, "tpu", "tpu-v5e"))
    assert first.name == "splash attention"
    assert first.entry != other.entry
    assert f"func.func private @{first.entry}(" in first.text
    assert first.text.count("cost_estimate") == (1 if kind == FORWARD else 2)


def test_pairs_that_masks_leave_are_counted():
    for (causal, window), (queries, keys) in product([(True, None), (False, 3), (True, 2)], [(5, 5), (4, 6), (6, 4)]):
        rows, columns = np.arange(queries)[:, None], np.arange(keys)
        allowed = (columns <= rows) | (not causal)
        if window is not None:
            allowed &= np.abs(rows - columns) < window
        assert Form(1.0, causal, window).attended(queries, keys) == allowed.sum()


def test_a_config_that_is_none_is_refused():
    with pytest.raises(ValueError, match="is no backend_config of an attention"):
        Form.parse('{"scale": 1.0, "slope": 2}')
    with pytest.raises(ValueError, match="is no backend_config of an attention"):
        Form.parse("dropout")
    form = Form(0.125, causal=True, window=7)
    assert Form.parse(form.text()) == form


def with_sinks(q, k, v, sinks, scale):
    """Softmax over the causal scores and a sink, whose value is 0, and the log-sum-exp of the scores alone."""
    scores = torch.einsum("bkgsd,bktd->bkgst", q, k) * scale
    scores = scores.masked_fill(torch.arange(k.shape[2]) > torch.arange(q.shape[3])[:, None], -math.inf)
    both = torch.cat([scores, sinks[:, :, None, None].expand(*scores.shape[:-1], 1)], -1).softmax(-1)
    return torch.einsum("bkgst,bkte->bkgse", both[..., :-1], v), scores.logsumexp(-1)


@pytest.mark.parametrize("scaled", ["by the op", "by the log-sum-exp"])
def test_sinks_take_their_share_of_the_weights(scaled: str) -> None:
    """Either in the op, or outside it, as who calls FlexAttention writes them: the log-sum-exp has a gradient then."""
    torch.manual_seed(0)
    form = Form(0.5, causal=True)
    given = [each.double().requires_grad_() for each in (*tensors(), torch.randn(2, 2))]
    if scaled == "by the op":
        out, _ = ops.attention(*given[:3], form, sinks=given[3])
    else:
        out, lse = ops.attention(*given[:3], form)
        out = out * torch.sigmoid(lse - given[3][..., None])[..., None] + 0.25 * lse[..., None]
    wanted, scores = with_sinks(*given, 0.5)
    wanted = wanted if scaled == "by the op" else wanted + 0.25 * scores[..., None]
    weights = torch.randn_like(wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(*(torch.autograd.grad(each, given, weights) for each in (out, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
