"""What teams train decoders with: what each plan splits, and that the compiled collectives are the predicted ones."""

from collections import defaultdict
from functools import cache
from math import prod

import pytest

pytest.importorskip("torch_xla")

import torch

import autoshard
from autoshard import manual
from autoshard.cost.machine.compute import op_flops
from autoshard.cost.predict import predict
from autoshard.errors import ManualPlanError
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target
from tests.manual import decoders

MESH = Mesh((2, 4))
THREE = Mesh((2, 2, 2), ("replicas", "shards", "tensor"))
ROUNDED = 1e-3
"""Fraction of the bytes that may differ: padding of tiny all-reduces."""


@cache
def graph_of(name):
    source = decoders.source(name, optimizer=torch.optim.AdamW)
    program = autoshard.capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    return build_graph(program)


def specs(graph, annotations):
    return {
        argument.name: annotations.pins[Value(op)]
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if Value(op) in annotations.pins
    }


def compiled(graph, plan, mesh, target="cpu"):
    """Kind -> bytes of its collectives, as compiled, which must be the predicted ones."""
    annotations = manual.PLANS[plan](graph, mesh)
    module = annotate(graph.program, graph, annotations, mesh)
    report, _ = compare_compiled(graph, annotations, mesh, parse_target(target, mesh.size), module)
    assert report.fidelity.value <= ROUNDED, str(report)
    found = defaultdict(int)
    for each in predict(graph, annotations, mesh).collectives:
        found[each.kind] += each.bytes
    assert sum(found.values()) == pytest.approx(report.judged.collective_bytes, rel=ROUNDED)
    return found


@pytest.mark.parametrize("name", decoders.DECODERS)
@pytest.mark.parametrize("plan", ["megatron", "sequence", "fsdp-tp", "context", "torchtitan"])
def test_collectives_of_decoders_are_the_predicted_ones(name, plan):
    assert compiled(graph_of(name), plan, MESH)


@pytest.mark.parametrize("plan", ["zero1", "zero2", "hsdp", "sequence", "context", "torchtitan"])
def test_collectives_on_three_axes_are_the_predicted_ones(plan):
    assert compiled(graph_of("deepseek"), plan, THREE)


@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("fsdp", "tensor_sequence"), ("fsdp", "context")])
def test_collectives_of_maxtexts_axes_are_the_predicted_ones(axes):
    assert compiled(graph_of("llama"), "maxtext", Mesh((2, 4), axes))


def test_latent_attention_is_split_by_heads_behind_the_narrow_products():
    found = specs(graph_of("deepseek"), manual.megatron(graph_of("deepseek"), MESH))
    roles = ("q_down", "q_up", "kv_down", "kv_up", "o")
    attention = {role: found[f"layers.0.attention.{decoders.META[role]}.weight"] for role in roles}
    narrow, columns, row = ((), ()), (("model",), ()), ((), ("model",))
    assert attention["q_down"] == attention["kv_down"] == narrow
    assert attention["q_up"] == attention["kv_up"] == columns
    assert attention["o"] == row
    assert found["output.weight"] == columns


def test_experts_are_split_inside_and_the_router_is_whole():
    graph = graph_of("mixtral")
    found = specs(graph, manual.megatron(graph, MESH))
    experts = "layers.0.feed_forward.experts"
    assert found[f"{experts}.w1"] == found[f"{experts}.w3"] == ((), ("model",), ())
    assert found[f"{experts}.w2"] == ((), (), ("model",))
    assert found["layers.0.feed_forward.router.weight"] == ((), ())
    by_expert = specs(graph, manual.expert_parallel(graph, MESH))
    assert {by_expert[f"{experts}.{name}"] for name in ("w1", "w2", "w3")} == {(("model",), (), ())}


def test_sequence_parallelism_gathers_once_for_experts_and_their_router():
    graph = graph_of("mixtral")
    annotations = manual.sequence_parallel(graph, MESH)
    outputs = manual.module_outputs(graph)
    norm = outputs["layers.0.ffn_norm"]
    assert annotations.pins[norm] == (("data",), ("model",), ())
    readers = {graph.program.ops[aten].module for value, aten in annotations.copies if value == norm}
    assert {"layers.0.feed_forward.router", "layers.0.feed_forward.experts"} <= readers
    assert annotations.pins[outputs["layers.0.feed_forward.router"]] == (("data",), (), ())
    whole = compiled(graph, "megatron", MESH)
    split = compiled(graph, "sequence", MESH)
    assert split["reduce-scatter"] > 0
    assert split["all-reduce"] < whole["all-reduce"]


def test_torchtitan_computes_no_product_twice_under_autocast():
    source = decoders.source("llama", optimizer=torch.optim.AdamW)
    source.model.forward = torch.autocast("xla", dtype=torch.bfloat16)(source.model.forward)
    graph = build_graph(
        autoshard.capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    )
    mesh = Mesh((2, 4), device="h100:8")
    program = predict(graph, manual.torchtitan(graph, mesh), mesh).compiled.program
    products = [step for step in program.steps if step.kind == "dot_general"]
    assert products
    assert {step.flops * mesh.size / op_flops(graph.ops[step.op], graph) for step in products} == {1.0}


def test_hybrid_sharding_copies_over_what_crosses_hosts_or_else_the_first_axis():
    graph = graph_of("llama")
    name = "layers.0.feed_forward.w1.weight"
    assert specs(graph, manual.hsdp(graph, THREE))[name] == (("shards", "tensor"), ())
    hosts = Mesh((2, 2, 2), ("pods", "hosts", "gpus"), "h100:4x2")
    assert specs(graph, manual.hsdp(graph, hosts))[name] == (("gpus",), ())
    slices = Mesh((2, 2, 2), ("slices", "x", "y"), "tpu-v5e:2x2:2slices")
    assert specs(graph, manual.hsdp(graph, slices))[name] == (("x", "y"), ())
    assert specs(graph, manual.hsdp(graph, slices))["tokens"] == (("slices", "x", "y"), ())
    found = compiled(graph, "hsdp", THREE)
    assert found["all-gather"] > found["all-reduce"] > 0


def test_context_parallelism_splits_tokens_and_gathers_keys_and_values():
    graph = graph_of("llama")
    annotations = manual.context_parallel(graph, MESH)
    found = specs(graph, annotations)
    assert found["tokens"] == (("data",), ("model",))
    assert found["layers.0.attention.wq.weight"] == (("data", "model"), ())
    outputs = manual.subtree_outputs(graph)
    assert annotations.pins[outputs["tok_embeddings"]] == annotations.pins[outputs["layers.1"]] == (
        ("data",), ("model",), (),
    )  # fmt: skip
    gathered = [
        each.op for each in predict(graph, annotations, MESH).collectives
        if (each.kind, each.axes) == ("all-gather", ("model",)) and graph.ops[each.op].module == "layers.0.attention"
        and graph.program.ops[graph.ops[each.op].aten].phase == "forward"
    ]  # fmt: skip
    assert len(gathered) == 2, "keys and values"
    with pytest.raises(ManualPlanError, match="for one that model divides"):
        manual.context_parallel(graph, Mesh((2, 3)))


# --- ZeRO ---------------------------------------------------------------------------------------------------------


def test_zero_1_all_reduces_gradients_and_gathers_parameters():
    graph = graph_of("llama")
    size = 4 * sum(prod(each.type.shape) for each in graph.program.arguments if each.role == "parameter")
    found = compiled(graph, "zero1", MESH)
    assert set(found) == {"all-reduce", "all-gather"}
    assert size <= found["all-reduce"] <= 1.09 * size, "the looked-up table's gradient is made of two parts"
    assert size <= found["all-gather"] <= 1.09 * size


def test_zero_2_reduce_scatters_gradients_and_gathers_parameters():
    graph = graph_of("llama")
    annotations = manual.zero_2(graph, MESH)
    found = specs(graph, annotations)
    name = "layers.0.feed_forward.w1.weight"
    assert found[name] == ((), ())
    assert found[f"{name}.exp_avg"] == (("data", "model"), ())
    assert annotations.pins[manual.gradients(graph)[name]] == (("data", "model"), ())
    moved, whole = compiled(graph, "zero2", MESH), compiled(graph, "zero1", MESH)
    assert moved["reduce-scatter"] > 0.8 * whole["all-reduce"]
    assert moved["all-reduce"] < 1e-3 * whole["all-reduce"]


@pytest.mark.parametrize("plan", ["zero1", "zero2", "torchtitan"])
def test_on_a_tpu_too_the_collectives_are_the_predicted_ones(plan):
    found = compiled(graph_of("llama"), plan, Mesh((2, 4), device="tpu-v5e"), "tpu-v5e:2x4")
    assert ("reduce-scatter" in found) == (plan != "zero1")


# --- the axes of frameworks ---------------------------------------------------------------------------------------


def test_torchtitans_axes_by_name_and_by_place():
    graph = graph_of("llama")
    name, by_place = "layers.0.feed_forward.w1.weight", Mesh((2, 2, 2))
    assert specs(graph, manual.torchtitan(graph, by_place))[name] == (("z", "model"), ())
    named = Mesh((2, 2, 2), ("dp_shard", "cp", "tp"))
    annotations = manual.torchtitan(graph, named)
    assert specs(graph, annotations)[name] == (("tp", "dp_shard", "cp"), ())
    assert specs(graph, annotations)["tokens"] == (("dp_shard",), ("cp",))
    outputs = manual.subtree_outputs(graph)
    assert annotations.pins[outputs["layers.0.ffn_norm"]] == (("dp_shard",), ("cp", "tp"), ())
    assert annotations.pins[outputs["output"]] == (("dp_shard",), ("cp",), ("tp",))
    weight = next(
        Value(op) for op, each in zip(graph.arguments, graph.program.arguments, strict=True) if each.name == name
    )
    assert {spec for (value, _), spec in annotations.copies.items() if value == weight} == {(("tp",), ())}
    experts = graph_of("mixtral")
    by_expert = specs(experts, manual.torchtitan(experts, Mesh((2, 4), ("dp_shard", "ep"))))
    assert by_expert["layers.0.feed_forward.experts.w1"] == (("ep", "dp_shard"), (), ())
    assert by_expert["tokens"] == (("dp_shard", "ep"), ())


def test_maxtexts_rules_by_name_and_by_place():
    graph = graph_of("llama")
    by_place = specs(graph, manual.maxtext(graph, Mesh((2, 4))))
    assert by_place["layers.0.attention.wq.weight"] == (("model",), ("data",))
    assert by_place["layers.0.attention.wo.weight"] == (("data",), ("model",))
    assert by_place["tok_embeddings.weight"] == by_place["output.weight"] == (("model",), ("data",))
    assert by_place["layers.0.ffn_norm.weight"] == (("model",),)
    outputs = manual.subtree_outputs(graph)
    residual = manual.maxtext(graph, Mesh((2, 4))).pins[outputs["layers.0"]]
    assert residual == (("data",), (), ("model",)), "activation_embed is split by tensor"
    mesh = Mesh((2, 2, 2), ("data", "fsdp", "tensor_sequence"))
    along = manual.maxtext(graph, mesh)
    assert along.pins[outputs["layers.0"]] == (("data", "fsdp"), ("tensor_sequence",), ())
    assert specs(graph, along)["layers.0.attention.wq.weight"] == (("tensor_sequence",), ("fsdp",))
    heads = manual.maxtext(graph, Mesh((2, 4), ("data", "sequence")))
    assert heads.pins[outputs["layers.0.attention.wq"]] == (("data",), (), ("sequence",)), "attention by heads"
    assert heads.pins[outputs["layers.0.feed_forward.w1"]] == (("data",), ("sequence",), ())
    experts = graph_of("mixtral")
    by_expert = specs(experts, manual.maxtext(experts, Mesh((2, 2, 2), ("fsdp", "tensor", "expert"))))
    assert by_expert["layers.0.feed_forward.experts.w1"] == (("expert",), ("tensor",), ("fsdp",))
    assert by_expert["layers.0.attention.wq.weight"] == (("tensor",), ("fsdp", "expert"))
    assert by_expert["tokens"] == (("fsdp", "expert"), ())
