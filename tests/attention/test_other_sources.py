"""Attentions of torch_xla's kernels and of packed documents, captured as those of PyTorch."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard.attention.form import FORWARD, Form
from autoshard.errors import CaptureError
from autoshard.frontends.choose import capture_of, switches_for
from autoshard.frontends.switches.table import active
from autoshard.stablehlo.reader import build_graph
from tests.conftest import FRONTENDS

pytest.importorskip("torch_xla")
WINDOW = 20


def splash_config() -> str:
    return json.dumps({"attentiontype_local_sliding": True, "slide_window_size": WINDOW})


class Kernels(nn.Module):
    """torch_xla's attentions, with documents, a bias, and a window."""

    def forward(self, x: torch.Tensor, documents: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        from torch_xla.experimental.custom_kernel import flash_attention
        from torch_xla.experimental.splash_attention import splash_attention

        made = flash_attention(x, x, x, True, documents, documents, 0.25)
        made = made + flash_attention(x, x, x, sm_scale=0.125, ab=bias)
        made = made + splash_attention(x, x, x, splash_config(), documents, True)
        return made + splash_attention(x, x, x, splash_config(), None, False)


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    documents = torch.arange(128).div(50, rounding_mode="floor").to(torch.int32).expand(2, -1)
    return torch.randn(2, 4, 128, 64), documents.contiguous(), torch.randn(2, 4, 128, 128)


def expected(x: torch.Tensor, documents: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(128).unsqueeze(1), torch.arange(128)
    near = (rows - columns).abs() <= WINDOW
    same = documents[:, None, :, None] == documents[:, None, None, :]
    attend = functional.scaled_dot_product_attention
    made = attend(x, x, x, same & (columns <= rows), scale=0.25) + attend(x, x, x, bias, scale=0.125)
    return made + attend(x, x, x, same & near & (columns <= rows), scale=1.0) + attend(x, x, x, near, scale=1.0)


def test_attentions_of_torch_xla_are_one_op_each():
    program = capture_of("torch_xla")(Kernels(), inputs(), train=False, switches=switches_for("tpu-v5e"))
    found = [Form.of(op.attrs) for op in build_graph(program).ops if op.kind == FORWARD]
    assert found == [
        Form(0.25, causal=True, segments=True),
        Form(1.0, causal=True, window=WINDOW + 1, segments=True),
        Form(1.0, window=WINDOW + 1),
    ]
    assert [why for *_, why in program.written_out] == ["splash attention takes no bias"]


def test_written_out_they_compute_what_pytorch_does():
    given = inputs()
    with active(["matmul", "attention:cpu"]):
        made = Kernels()(*(each.to("xla") for each in given)).cpu()
    torch.testing.assert_close(made, expected(*given), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_captured_is_said():
    from torch_xla.experimental.splash_attention import splash_attention

    class Capped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return splash_attention(x, x, x, splash_config(), attn_logits_soft_cap=30.0)

    program = capture_of("torch_xla")(Capped(), inputs()[:1], train=False, switches=switches_for("tpu-v5e"))
    (op,) = (op for op in build_graph(program).ops if op.kind == FORWARD)
    assert Form.of(op.attrs).soft_cap == 30.0
    with pytest.raises(CaptureError, match="attn_logits_soft_cap"):
        capture_of("torch_xla")(Capped(), inputs()[:1], train=False, switches=switches_for("h100"))


@pytest.mark.parametrize(
    ("device", "form"),
    [("tpu-v5e", Form(0.125, causal=True, segments=True)), ("h100", Form(0.125, bias=True))],
)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_packed_documents_are_segments_where_a_kernel_has_them(device, form, frontend):
    """transformers finds them by positions that begin anew."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=1,
        vocab_size=100,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(2, 256, dtype=torch.long)
    given = {"input_ids": tokens, "position_ids": torch.arange(256).remainder(100).expand(2, -1), "labels": tokens}
    program = capture_of(frontend)(model, given, train=True, switches=switches_for(device))
    assert [Form.of(op.attrs) for op in build_graph(program).ops if op.kind == FORWARD] == [form]
    assert not program.written_out
