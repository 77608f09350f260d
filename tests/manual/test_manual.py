"""The plans people write by hand: which weights are split how, which activations are annotated, for models they fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.errors import ManualPlanError
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import AtenOp, TensorType
from autoshard.sources import load_source
from autoshard.stablehlo.reader import build_graph
from tests.graph.helpers import graph_from_text

pytest.importorskip("transformers")

MESH = Mesh((2, 4), device="tpu-v5e")
NONE: Spec = ((), ())

GPT2 = {"n_layer": "2", "n_embd": "64", "n_head": "4", "vocab_size": "256", "n_positions": "32"}
LLAMA = {
    "num_hidden_layers": "2",
    "hidden_size": "64",
    "intermediate_size": "128",
    "num_attention_heads": "4",
    "vocab_size": "256",
    "max_position_embeddings": "32",
}


def hf(model_type: str, settings: dict[str, str]) -> Graph:
    source = load_source(f"hf:{model_type}", batch=8, seq=16, settings=settings, train="adamw")
    return build_graph(autoshard.capture(source.model, source.inputs, optimizer=source.optimizer))


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    return hf("gpt2", GPT2)


@pytest.fixture(scope="module")
def llama() -> Graph:
    return hf("llama", LLAMA)


def named(graph: Graph, annotations) -> dict[str, Spec]:
    return {
        argument.name: annotations.pins[Value(op)]
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if Value(op) in annotations.pins
    }


def test_data_parallel_splits_the_batch_over_every_axis_and_nothing_else(gpt2: Graph):
    annotations = manual.data_parallel(gpt2, MESH)
    specs = named(gpt2, annotations)
    assert specs["input_ids"] == (("data", "model"), ())
    assert specs["transformer.h.0.attn.c_attn.weight"] == NONE
    assert {value for value in annotations.pins if gpt2.ops[value.op].kind != "argument"} == set()


def test_zero_1_splits_the_states_and_keeps_the_weights_whole(gpt2: Graph):
    annotations = manual.zero_1(gpt2, MESH)
    specs = named(gpt2, annotations)
    assert specs["input_ids"] == (("data", "model"), ())
    assert specs["transformer.h.0.attn.c_attn.weight"] == NONE
    assert specs["transformer.h.0.attn.c_attn.weight.exp_avg"] == (("data", "model"), ())
    assert specs["transformer.h.1.ln_1.bias.exp_avg_sq"] == (("data", "model"),)
    costs = {plan: predict(gpt2, plan(gpt2, MESH), MESH) for plan in (manual.data_parallel, manual.zero_1)}
    assert costs[manual.zero_1].peak_memory_bytes < costs[manual.data_parallel].peak_memory_bytes


def test_zero_1_has_no_form_for_a_step_without_states():
    with torch.device("meta"):
        model = torch.nn.Linear(64, 8)
    program = autoshard.capture(model, torch.empty(16, 64), loss_fn=torch.sum, optimizer=torch.optim.SGD)
    with pytest.raises(ManualPlanError, match="no optimizer states"):
        manual.zero_1(build_graph(program), MESH)


def test_fsdp_splits_every_parameter_and_its_states_and_the_output_of_each_block(gpt2: Graph):
    annotations = manual.fsdp(gpt2, MESH)
    specs = named(gpt2, annotations)
    assert specs["transformer.h.0.attn.c_attn.weight"] == (("data", "model"), ())
    assert specs["transformer.h.0.attn.c_attn.weight.exp_avg"] == (("data", "model"), ())
    assert specs["transformer.h.1.ln_1.bias"] == (("data", "model"),)
    activations = {
        gpt2.ops[value.op].module: spec
        for value, spec in annotations.pins.items()
        if gpt2.ops[value.op].kind != "argument"
    }
    assert activations == {f"transformer.h.{i}": (("data", "model"), (), ()) for i in range(2)}


def test_fsdp_takes_the_next_dim_where_the_first_does_not_divide():
    with torch.device("meta"):
        model = torch.nn.Linear(64, 6)
    program = autoshard.capture(model, torch.empty(16, 64), loss_fn=torch.sum, optimizer=torch.optim.SGD)
    graph = build_graph(program)
    assert named(graph, manual.fsdp(graph, MESH)) == {
        "input": (("data", "model"), ()),
        "weight": ((), ("data", "model")),
        "bias": ((),),
    }


def test_megatron_pairs_column_and_row_whatever_way_the_weights_lie(gpt2: Graph, llama: Graph):
    """HF's GPT-2 keeps weights as (in, out), nn.Linear as (out, in)."""
    specs = named(gpt2, manual.megatron(gpt2, MESH))
    assert specs["transformer.h.0.mlp.c_fc.weight"] == ((), ("model",))
    assert specs["transformer.h.0.mlp.c_fc.bias"] == (("model",),)
    assert specs["transformer.h.0.mlp.c_proj.weight"] == (("model",), ())
    assert specs["transformer.h.0.mlp.c_proj.bias"] == ((),)
    specs = named(llama, manual.megatron(llama, MESH))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert specs[f"model.layers.1.{name}.weight"] == (("model",), ())
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert specs[f"model.layers.1.{name}.weight"] == ((), ("model",))


def test_megatron_splits_embedding_and_head_by_vocabulary_and_the_batch_by_data(gpt2: Graph, llama: Graph):
    tied, untied = manual.megatron(gpt2, MESH), manual.megatron(llama, MESH)
    assert named(gpt2, tied)["transformer.wte.weight"] == (("model",), ())
    assert named(gpt2, tied)["transformer.wpe.weight"] == NONE
    assert named(llama, untied)["model.embed_tokens.weight"] == (("model",), ())
    assert named(llama, untied)["lm_head.weight"] == (("model",), ())
    assert named(gpt2, tied)["input_ids"] == (("data",), ())
    for graph, pinned, module in ((gpt2, tied, "transformer.wte"), (llama, untied, "model.embed_tokens")):
        assert pinned.pins[manual.module_outputs(graph)[module]] == (("data",), (), ())


def test_megatron_annotates_column_outputs_split_and_row_outputs_whole(gpt2: Graph):
    pins = manual.megatron(gpt2, MESH).pins
    outputs = manual.module_outputs(gpt2)
    assert pins[outputs["transformer.h.0.mlp.c_fc"]] == (("data",), (), ("model",))
    assert pins[outputs["transformer.h.0.mlp.c_proj"]] == (("data",), (), ())


def test_megatron_alternates_along_a_chain_without_names():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    graph = build_graph(autoshard.capture(model, torch.empty(16, 64)))
    specs = named(graph, manual.megatron(graph, MESH))
    assert [specs[f"{i}.weight"] for i in range(3)] == [(("model",), ()), ((), ("model",)), NONE]


def test_megatron_has_no_form_for_a_convolutional_network():
    with torch.device("meta"):
        layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 8)]
        model = torch.nn.Sequential(*layers)
    graph = build_graph(autoshard.capture(model, torch.empty(16, 3, 8, 8)))
    assert named(graph, manual.fsdp(graph, MESH))["0.weight"] == (("data", "model"), (), (), ())
    with pytest.raises(ManualPlanError, match="pairs of linear layers"):
        manual.megatron(graph, MESH)


@pytest.mark.parametrize("name", ["dp", "zero1", "fsdp", "megatron"])
@pytest.mark.parametrize("mesh", [Mesh((8,)), Mesh((2, 4)), Mesh((2, 2, 2))], ids=lambda mesh: str(mesh.shape))
def test_every_plan_fits_every_mesh(name: str, mesh: Mesh, gpt2: Graph):
    annotations = manual.PLANS[name](gpt2, mesh)
    for value, spec in annotations.pins.items():
        mesh.check(spec, gpt2.type_of(value).shape, name)
    assert predict(gpt2, annotations, mesh).step_time_s > 0


def test_a_plan_that_does_not_exist_is_refused(gpt2: Graph):
    with pytest.raises(ValueError, match=r"there are dp, .*fsdp, .*megatron, .*expert"):
        autoshard.manual_plan("zero", gpt2.program, MESH)


# --- models beyond causal transformers ----------------------------------------------------------------------------

TINY = {
    "bert": {"num_hidden_layers": "1", "hidden_size": "64", "intermediate_size": "128", "vocab_size": "250"},
    "t5": {
        "num_layers": "1",
        "num_decoder_layers": "1",
        "d_model": "64",
        "d_ff": "128",
        "d_kv": "16",
        "num_heads": "4",
    },
    "mixtral": LLAMA | {"num_hidden_layers": "1", "num_local_experts": "8", "num_key_value_heads": "4"},
}


def built(function: str, **settings: int) -> Graph:
    text = {key: str(value) for key, value in settings.items()}
    source = load_source(f"benchmarks/nets.py:{function}", settings=text, train="adamw")
    return build_graph(
        autoshard.capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    )


@pytest.fixture(scope="module")
def tiny() -> dict[str, Graph]:
    found = {
        name: hf(name, settings | ({"num_attention_heads": "4"} if name == "bert" else {}))
        for name, settings in TINY.items()
    }
    found["moe"] = built("moe", seq=16, layers=1, width=64, hidden=128, heads=4, vocabulary=256)
    found["dlrm"] = built("dlrm", batch=64, width=16, rows=40_000, bag=2, tables=4, hidden=32)
    return found


def test_fsdp_annotates_a_block_whose_output_a_child_makes(tiny: dict[str, Graph]):
    """BERT's layer returns what its last child made: no op of its own."""
    graph = tiny["bert"]
    pins = manual.fsdp(graph, MESH).pins
    assert pins[manual.subtree_outputs(graph)["bert.encoder.layer.0"]] == (("data", "model"), (), ())


def test_megatron_leaves_layers_that_it_has_no_name_for_whole(tiny: dict[str, Graph]):
    specs = named(tiny["bert"], manual.megatron(tiny["bert"], MESH))
    assert specs["bert.encoder.layer.0.attention.self.query.weight"] == (("model",), ())
    assert specs["bert.encoder.layer.0.attention.output.dense.weight"] == ((), ("model",))
    assert specs["bert.encoder.layer.0.output.dense.weight"] == ((), ("model",))
    assert specs["bert.embeddings.word_embeddings.weight"] == (("model",), ())
    assert specs["cls.predictions.transform.dense.weight"] == NONE
    assert named(tiny["mixtral"], manual.megatron(tiny["mixtral"], MESH))["model.layers.0.mlp.gate.weight"] == NONE


def test_megatron_splits_encoder_decoder_and_cross_attention_of_t5(tiny: dict[str, Graph]):
    specs = named(tiny["t5"], manual.megatron(tiny["t5"], MESH))
    for path in ("encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"):
        assert specs[f"{path}.q.weight"] == specs[f"{path}.v.weight"] == (("model",), ())
        assert specs[f"{path}.o.weight"] == ((), ("model",))
    assert specs["decoder.block.0.layer.2.DenseReluDense.wi.weight"] == (("model",), ())
    assert specs["decoder.block.0.layer.2.DenseReluDense.wo.weight"] == ((), ("model",))
    assert specs["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == NONE


def test_megatron_splits_inside_every_expert_and_expert_parallelism_between_them(tiny: dict[str, Graph]):
    inside = {name: named(tiny[name], manual.megatron(tiny[name], MESH)) for name in ("moe", "mixtral")}
    assert inside["moe"]["layers.0.experts.wi"] == ((), (), ("model",))
    assert inside["moe"]["layers.0.experts.wo"] == ((), ("model",), ())
    assert inside["mixtral"]["model.layers.0.mlp.experts.gate_up_proj"] == ((), ("model",), ())
    assert inside["mixtral"]["model.layers.0.mlp.experts.down_proj"] == ((), (), ("model",))
    annotations = manual.expert_parallel(tiny["moe"], MESH)
    between = named(tiny["moe"], annotations)
    assert between["layers.0.experts.wi"] == between["layers.0.experts.wi.exp_avg"] == (("model",), (), ())
    assert between["layers.0.q_proj.weight"] == NONE
    assert between["tokens"] == (("data", "model"), ())
    made = [spec for value, spec in annotations.pins.items() if tiny["moe"].ops[value.op].kind == "dot_general"]
    assert made == [(("model",), ("data",), (), ())] * 2


def test_experts_that_read_a_vector_each_have_no_batch_to_split():
    text = """
    func.func @main(%arg0: tensor<8x16x32xf32>, %arg1: tensor<8x16xf32>) -> tensor<8x32xf32> {
      %0 = stablehlo.dot_general %arg1, %arg0, batching_dims = [0] x [0], contracting_dims = [1] x [1]
        : (tensor<8x16xf32>, tensor<8x16x32xf32>) -> tensor<8x32xf32> loc("op0:0")
      return %0 : tensor<8x32xf32>
    }
    """
    ops = [AtenOp(0, "aten.bmm.default", "", "forward", (TensorType((8, 32), "f32"),))]
    graph = dataclasses.replace(graph_from_text(text, ops=ops), aten_outputs={(0, 0): Value(2)})
    assert manual.expert_parallel(graph, MESH).pins[Value(2)] == (("model",), ())


def test_embedding_parallelism_splits_the_rows_of_large_tables(tiny: dict[str, Graph]):
    annotations = manual.embedding_parallel(tiny["dlrm"], MESH)
    specs = named(tiny["dlrm"], annotations)
    everyone = ("data", "model")
    assert specs["model.tables.2.weight"] == (everyone, ())
    assert specs["model.tables.0.weight"] == NONE, "1460 rows"
    assert specs["categories"] == (everyone, (), ())
    assert specs["model.top.0.weight"] == NONE
    assert annotations.pins[manual.subtree_outputs(tiny["dlrm"])["model.tables.2"]] == (everyone, ())


@pytest.mark.parametrize(("plan", "model"), [("expert", "bert"), ("expert", "dlrm"), ("embedding", "moe")])
def test_a_plan_that_means_nothing_for_a_model_says_why(plan: str, model: str, tiny: dict[str, Graph]):
    with pytest.raises(ManualPlanError, match=r"experts stacked|less than half"):
        manual.PLANS[plan](tiny[model], MESH)


@pytest.mark.parametrize("model", ["bert", "t5", "mixtral", "moe", "dlrm"])
def test_every_plan_of_every_model_can_be_predicted(model: str, tiny: dict[str, Graph]):
    for name, plan in manual.PLANS.items():
        try:
            annotations = plan(tiny[model], MESH)
        except ManualPlanError:
            continue
        for value, spec in annotations.pins.items():
            MESH.check(spec, tiny[model].type_of(value).shape, name)
        assert predict(tiny[model], annotations, MESH).step_time_s > 0
