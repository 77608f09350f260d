"""PyTorch's FlexAttention, captured as one op or written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, flex_attention

import autoshard
from autoshard.attention.form import FORWARD, Form
from autoshard.errors import CaptureError
from autoshard.frontends.choose import capture_of, switches_for
from autoshard.stablehlo.reader import build_graph
from tests.conftest import FRONTENDS
from tests.frontends.test_writes import Run

SEQ, WINDOW = 256, 20


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() < WINDOW


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < WINDOW * (h + 1))


class Net(nn.Module):
    """Attention with the functions that `body` gives, of queries in four heads and keys in two."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.slopes = body, nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        key = x[:, :2] * 0.5
        score_mod, mask_mod, batch = self.body(self, ids)
        mask = None if mask_mod is None else create_block_mask(mask_mod, batch, None, SEQ, SEQ, device=x.device)
        made: torch.Tensor = flex_attention(x, key, key, score_mod, mask, enable_gqa=True)
        return made


class Sinks(nn.Module):
    """As torchtitan writes sinks: results scaled by the log-sum-exps."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks, self.attend = nn.Parameter(torch.randn(4)), torch.compile(flex_attention)
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        mask = create_block_mask(causal, None, None, SEQ, SEQ, device=x.device)
        made, lse = self.attend(x, x, x, block_mask=mask, return_lse=True)
        return made * torch.sigmoid(lse - self.sinks[:, None]).unsqueeze(-1).to(made.dtype)


def documents(net: Net, ids: torch.Tensor) -> Any:
    def same(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ids[b, q] == ids[b, kv]

    return None, and_masks(causal, same), len(ids)


def alibi(net: Net, ids: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + net.slopes[h] * (kv - q), causal, None


def picked(net: Net, ids: torch.Tensor) -> Any:
    """Indexed one dim at a time, which broadcast indices would not do."""
    table = net.slopes.view(2, 2).expand(2, 2, 2)
    return lambda score, b, h, q, kv: score + table[b][1][h % 2], None, None


def of_some_heads(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The first and the last head are as others are not."""
    return (q >= kv) & ((h % 3 == 0) | (q - kv < WINDOW))


BODIES: dict[str, tuple[Any, list[Form]]] = {
    "causal": (lambda *_: (None, causal, None), [Form(0.25, causal=True)]),
    "near": (lambda *_: (lambda score, *_: score, near, None), [Form(0.25, window=WINDOW)]),
    "all": (lambda *_: (None, None, None), [Form(0.25)]),
    "documents": (documents, [Form(0.25, causal=True, segments=True)]),
    "soft cap": (
        lambda *_: (lambda score, *_: 2 * torch.tanh(score / 2), causal, None),
        [Form(0.25, causal=True, soft_cap=2.0)],
    ),
    "capped later": (
        lambda *_: (lambda score, b, h, q, kv: torch.where(q - kv > 200, score.tanh(), score), causal, None),
        [],
    ),
    "some heads": (lambda *_: (None, of_some_heads, None), []),
    "some scores": (lambda *_: (lambda score, b, h, q, kv: torch.where(h == 2, score.tanh(), score), None, None), []),
    "by head": (lambda *_: (None, by_head, None), []),
    "alibi": (alibi, []),
    "picked": (picked, []),
}
"""Name -> functions of a net, and its attentions that are one op on a TPU."""


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, SEQ, 16).to(dtype), torch.arange(SEQ).div(100, rounding_mode="floor").expand(2, -1)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_is_captured_is_what_pytorch_computes(name: str, frontend: str) -> None:
    """It failed in `create_block_mask`."""
    body, forms = BODIES[name]
    net, given = Net(body), inputs()
    made = Run(autoshard.capture(net, given, train=False, frontend=frontend), net)(*given)
    torch.testing.assert_close(next(iter(made.values())), net(*given).detach(), rtol=1e-5, atol=1e-5)
    program = capture_of(frontend)(net, given, train=False, switches=switches_for("tpu-v5e"))
    assert [Form.of(op.attrs) for op in build_graph(program).ops if op.kind == FORWARD] == forms
    assert bool(program.written_out) == (not forms)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_create_mask_makes_the_mask(frontend: str) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            mask = create_mask(lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv]), 2, 1, SEQ, SEQ, x.device)
            return mask.to(x.dtype)

    net, given = Masked(), inputs()
    made = Run(autoshard.capture(net, given, train=False, frontend=frontend), net)(*given)
    torch.testing.assert_close(next(iter(made.values())), net(*given))


def test_a_mask_that_a_kernel_lacks_is_its_bias() -> None:
    given = inputs(torch.bfloat16)
    program = capture_of("torchax")(Net(documents), given, train=False, switches=switches_for("h100"))
    assert [Form.of(op.attrs) for op in build_graph(program).ops if op.kind == FORWARD] == [Form(0.25, bias=True)]


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_log_sum_exps_have_gradients(frontend: str) -> None:
    given = inputs(torch.bfloat16)
    step = capture_of(frontend)(
        Sinks().bfloat16(), given, loss_fn=lambda out: out.float().mean(), train=True, switches=switches_for("tpu-v5e")
    )
    assert [op.kind for op in build_graph(step).ops if op.kind.startswith("attention")] == [FORWARD, "attention_grad"]


def test_what_cannot_be_traced_is_said() -> None:
    def decides(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv if bool(q > 3) else q < kv

    with pytest.raises(CaptureError, match=r"flex_attention's .*decides cannot be captured"):
        autoshard.capture(Net(lambda *_: (None, decides, None)), inputs(), train=False, frontend="torchax")


def test_scores_that_differ_at_one_place_are_not_kept() -> None:
    def odd(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where((q == 77) & (kv == 3), -math.inf, score)

    given = inputs()
    program = capture_of("torchax")(
        Net(lambda *_: (odd, None, None)), given, train=False, switches=switches_for("tpu-v5e")
    )
    assert program.written_out
