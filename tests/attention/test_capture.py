"""Which attentions are kept as one op, and what a plan says of them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoshard
from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.frontends.choose import capture_of, switches_for
from autoshard.frontends.switches import transformers_library
from autoshard.graph.rules.base import rule_for
from autoshard.lower.torch_xla.regions import warn_of_versions
from autoshard.plans import json_format
from autoshard.plans.value import PlanError
from autoshard.show.report import plan_report
from autoshard.sources import load_source
from autoshard.stablehlo.reader import build_graph
from tests.attention.small import Decoder, graph_of, source
from tests.conftest import FRONTENDS


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_an_attention_and_its_gradient_are_one_op_each(frontend):
    graph = graph_of(source(), "tpu-v5e", frontend)
    kinds = [op.kind for op in graph.ops if op.kind in (FORWARD, GRADIENT)]
    assert kinds == [FORWARD, FORWARD, GRADIENT, GRADIENT]
    op = next(op for op in graph.ops if op.kind == FORWARD)
    assert [graph.type_of(value).shape for value in op.operands] == [(8, 4, 2, 512, 16), *[(8, 4, 512, 16)] * 2]
    assert Form.of(op.attrs) == Form(0.25, causal=True)
    assert [result.shape for result in op.results] == [(8, 4, 2, 512, 16), (8, 4, 2, 512)]


def test_for_a_cpu_or_no_device_it_is_written_out():
    for device in (None, "cpu", "h100"):  # cuDNN has no f32
        graph = graph_of(source(), device, "torchax")
        assert not any(op.kind == FORWARD for op in graph.ops)
        assert bool(graph.program.written_out) == (device == "h100")


def test_a_device_of_a_file_has_the_kernels_of_its_target():
    """It was looked up by its name, among the kinds that are built in."""
    device = str(Path(__file__).parents[2] / "benchmarks" / "zoo_device.toml")
    assert "attention:tpu" in switches_for(device)
    assert any(op.kind == FORWARD for op in graph_of(source(), device, "torchax").ops)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_is_written_out_leaves_no_op_of_the_kernel(frontend):
    """Such a program is recorded without the device's switch, and captured again without it."""
    device, plain = (graph_of(source(), device, frontend).program for device in ("h100", None))
    assert device.switches == plain.switches
    assert [op.name for op in device.ops] == [op.name for op in plain.ops]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("saved", "count"), [("flash", 1), ("efficient", 1), (None, 2)])
def test_a_selective_checkpoint_saves_it_by_the_names_of_pytorch(saved, count, frontend):
    wanted = [torch.ops.aten.mm.default if saved is None else named(saved)]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def attend(self, x):
            return functional.scaled_dot_product_attention(x.sin(), x, x).cos()

        def forward(self, x):
            contexts = partial(create_selective_checkpoint_contexts, wanted)
            return checkpoint(self.attend, self.layer(x), use_reentrant=False, context_fn=contexts).sum()

    program = capture_of(frontend)(Net(), torch.zeros(2, 2, 128, 16), train=True, switches=switches_for("tpu-v5e"))
    assert sum(op.kind == FORWARD for op in build_graph(program).ops) == count


def named(kind):
    return getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default


class Forms(nn.Module):
    """Attentions of which a kernel computes the first two."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        attend = functional.scaled_dot_product_attention
        made = attend(x, x, x, mask.bool())
        made = made + attend(x, x, x, bias.detach(), scale=2.0)
        made = made + attend(x, x, x, bias)
        return made + attend(x, x, x, dropout_p=0.5)


def test_what_no_kernel_computes_is_written_out_and_said_why():
    x = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16)
    mask, bias = torch.ones(128, 128), torch.zeros(1, 4, 128, 128, dtype=torch.bfloat16, requires_grad=True)
    program = capture_of("torchax")(Forms(), (x, mask, bias), train=False, switches=switches_for("h100"))
    kept = [op.name for op in program.ops].count("autoshard.attention.default")
    said = [why for *_, why in program.written_out]
    assert kept >= 2
    assert any("dropout" in why for why in said)


class Batched(nn.Module):
    """Queries without a dim of heads, each row of the batch with a bias of its own."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, bias)


def test_without_heads_a_bias_of_three_dims_is_one_for_each_of_the_batch():
    x, bias = torch.randn(3, 128, 64, dtype=torch.bfloat16), torch.zeros(3, 128, 128, dtype=torch.bfloat16)
    program = capture_of("torchax")(Batched(), (x, bias), train=False, switches=switches_for("h100"))
    op = next(op for op in build_graph(program).ops if op.kind == FORWARD)
    assert Form.of(op.attrs).bias
    assert len(op.operands) == 4


class Twice(nn.Module):
    """Two attentions of one module that no kernel computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attend = functional.scaled_dot_product_attention
        return attend(x, x, x, dropout_p=0.5) + attend(x, x, x, dropout_p=0.5)


def test_each_attention_that_is_written_out_counts():
    x = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16)
    program = capture_of("torchax")(Twice(), (x,), train=False, switches=switches_for("h100"))
    assert len(program.written_out) == 2


def test_masks_of_other_patterns_are_no_windows():
    masks = pytest.importorskip("transformers.masking_utils")
    found = transformers_library._window
    assert found(masks.sliding_window_causal_mask_function(5), 300, 300) == (True, 5)
    assert found(masks.causal_mask_function, 300, 300) == (True, None)
    assert found(masks.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.long)), 300, 300) is None
    assert found(masks.bidirectional_mask_function, 300, 300) == (False, None)
    assert found(masks.sliding_window_bidirectional_mask_function(5), 300, 300) == (False, 6)
    assert found(masks.sliding_window_bidirectional_mask_function(5), 6, 6) == (False, None)
    assert found(lambda b, h, q, kv: q < 0, 300, 300) is None
    assert found(masks.or_masks(masks.causal_mask_function, lambda b, h, q, kv: kv < 9), 300, 300) is None
    assert found(masks.packed_sequence_mask_function(torch.zeros(1, 300)), 300, 300) is None


def test_a_plan_says_how_many_are_one_op_and_has_version_2():
    made = autoshard.plan(
        Decoder(torch.bfloat16), torch.randint(0, 64, (8, 512)), mesh="2x4", device="h100", frontend="torchax"
    )
    assert made.info["attention"]["fused"] == 2
    assert "Attention: 2 as one op, 0 written out" in plan_report(made)
    text = json_format.dumps(made)
    assert json.loads(text)["version"] == 2
    again = json_format.loads(text)
    assert (again.info, json_format.dumps(again)) == (made.info, text)
    with pytest.raises(PlanError, match="reads versions 1 and 2"):
        json_format.loads(text.replace('"version": 2', '"version": 3', 1))
    with warnings.catch_warnings(action="error"):
        warn_of_versions(made)
    older = replace(made, info={"attention": {**made.info["attention"], "versions": {"jax": "0.1"}}})
    with pytest.warns(UserWarning, match=r"planned with the kernels of jax 0\.1 \(here: \d"):
        warn_of_versions(older)


def test_queries_stay_together_in_blocks_and_reduce_what_they_share():
    graph = graph_of(source(), "tpu-v5e", "torchax")
    forward, gradient = (next(op for op in graph.ops if op.kind == kind) for kind in (FORWARD, GRADIENT))
    rule = rule_for(forward, graph)
    assert rule is not None
    assert [rule.factors[f].size for f in rule.operands[0][3]] == [4, 128]
    assert [rule.factors[f].kind for f in rule.operands[0][3]] == ["parallel", "replicated"]
    rule = rule_for(gradient, graph)
    assert rule is not None
    queries = rule.operands[0][3][0]
    assert (rule.factors[queries].kind, rule.factors[queries].reducer) == ("reduce", "add")
    assert not any(queries in dim for result in rule.results[1:] for dim in result)
    assert build_graph(graph.program).ops == graph.ops


@pytest.mark.parametrize("window", [100, 512])
def test_a_sliding_window_of_transformers_is_one_op_and_no_bias(window):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {name: str(size) for name, size in (sizes | {"head_dim": 16, "vocab_size": 64}).items()}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), "None")
    made = load_source(
        "hf:mistral", layers=1, batch=2, seq=256, settings=settings | tokens | {"sliding_window": str(window)}
    )
    given = {"train": False, "switches": switches_for("tpu-v5e")}
    graph = build_graph(capture_of("torchax")(made.model, made.inputs, **given))
    (form,) = [Form.of(op.attrs) for op in graph.ops if op.kind == FORWARD]
    assert form == Form(0.25, causal=True, window=window if window < 256 else None)
    op = next(op for op in graph.ops if op.kind == FORWARD)
    assert graph.type_of(op.operands[1]).shape == (2, 2, 256, 16)  # keys are not repeated for each query head


OF_LIBRARY: dict[str, tuple[dict[str, int], list[Form]]] = {
    "gpt_oss": (
        {"num_local_experts": 4, "sliding_window": 100, "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 16},
        [Form(0.25, causal=True, window=100), Form(0.25, causal=True)],
    ),
    "gemma2": (
        {
            "sliding_window": 100,
            "vocab_size": 64,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
        },
        [Form(0.25, causal=True, window=100, soft_cap=50.0), Form(0.25, causal=True, soft_cap=50.0)],
    ),
    "modernbert": (
        {"local_attention": 100, "vocab_size": 64, "cls_token_id": 1, "sep_token_id": 2},
        [Form(0.25), Form(0.25, window=51)],
    ),
}
"""Kind of model -> its configuration, and its attentions."""


def summed(output):
    return output.logits.sum() if hasattr(output, "logits") else output[0].sum()


@pytest.mark.parametrize("kind", OF_LIBRARY)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_sinks_soft_caps_and_windows_to_both_sides_are_one_op(kind, frontend):
    """PyTorch has no function with sinks or caps: they were written out, as such windows were."""
    pytest.importorskip("transformers")
    own, forms = OF_LIBRARY[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4} | own
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), "None")
    made = load_source(
        f"hf:{kind}", layers=2, batch=2, seq=256, settings={name: str(size) for name, size in sizes.items()} | tokens
    )
    graph = build_graph(
        capture_of(frontend)(made.model, made.inputs, loss_fn=summed, train=True, switches=switches_for("tpu-v5e"))
    )
    assert [Form.of(op.attrs) for op in graph.ops if op.kind == FORWARD] == forms
    assert sum(op.kind == GRADIENT for op in graph.ops) == 2
    assert not graph.program.written_out
