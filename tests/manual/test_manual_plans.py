"""Plans written by hand: they train with the numbers of one device, and their compiled bytes are predicted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

import torch

import autoshard
from autoshard import manual
from autoshard.errors import ManualPlanError
from autoshard.graph.ops import Value
from autoshard.manual.transformers_tp import _WEIGHT_DIM, UnknownStyleWarning
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target
from tests.manual import models

ROOT = Path(__file__).resolve().parents[2]
MESH = models.MESH
ALL = ("data", "model")
BATCH = (("data",), (), ())
SEQUENCE = (("data",), ("model",), ())


@pytest.fixture(scope="module")
def graphs():
    found = {}
    for name in dict.fromkeys(models.TRIED.values()):
        source = models.source(name)
        program = autoshard.capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
        found[name] = build_graph(program)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `eight_devices.py` saw, in a process of its own."""
    out = tmp_path_factory.mktemp("manual") / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.manual.eight_devices", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


def named(graph, annotations):
    return {
        argument.name: annotations.pins[Value(op)]
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if Value(op) in annotations.pins
    }


def test_every_plan_is_tried():
    assert set(models.TRIED) == set(manual.PLANS)


@pytest.mark.parametrize("name", manual.PLANS)
def test_a_plan_trains_with_the_numbers_of_one_device(name, seen):
    found = seen[name]
    assert "failed" not in found, found["failed"]
    assert found["equal"], found["said"]
    assert found["compiled_once"]


@pytest.mark.parametrize("name", manual.PLANS)
def test_the_compiled_bytes_of_a_plan_are_predicted(name, graphs):
    graph = graphs[models.TRIED[name]]
    annotations = manual.PLANS[name](graph, MESH)
    module = annotate(graph.program, graph, annotations, MESH)
    report, _ = compare_compiled(graph, annotations, MESH, parse_target("cpu", MESH.size), module)
    assert report.judged.collective_bytes > 0
    assert report.fidelity.value <= 0.05, str(report)


def test_sequence_parallelism_splits_what_goes_between_blocks_and_gathers_what_columns_read(graphs):
    graph = graphs["language"]
    annotations = manual.sequence_parallel(graph, MESH)
    outputs = manual.module_outputs(graph)
    for module in ("embed_tokens", "layers.0.norm", "layers.0.down_proj", "layers.0", "norm"):
        assert annotations.pins[outputs[module]] == SEQUENCE
    assert annotations.pins[outputs["layers.0.up_proj"]] == (("data",), (), ("model",))
    copied = {value for value, _ in annotations.copies}
    assert {outputs["layers.0.norm"], outputs["norm"]} <= copied
    assert set(annotations.copies.values()) == {BATCH}
    assert named(graph, annotations)["layers.0.norm.weight"] == ((),)


def test_two_dimensional_plans_split_what_megatron_leaves_by_the_other_axis(graphs):
    specs = named(graphs["language"], manual.fsdp_tensor_parallel(graphs["language"], MESH))
    assert specs["layers.0.up_proj.weight"] == (("model",), ("data",))
    assert specs["layers.0.down_proj.weight.momentum_buffer"] == (("data",), ("model",))
    assert specs["embed_tokens.weight"] == (("model",), ("data",))
    assert specs["layers.0.norm.weight"] == (("data",),)
    outputs = manual.subtree_outputs(graphs["language"])
    assert manual.fsdp_tensor_parallel(graphs["language"], MESH).pins[outputs["layers.0"]] == BATCH
    inside = named(graphs["language"], manual.hsdp(graphs["language"], MESH))
    assert inside["layers.0.up_proj.weight"] == (("model",), ())
    for plan in (manual.fsdp_tensor_parallel, manual.hsdp):
        with pytest.raises(ManualPlanError, match="two axes"):
            plan(graphs["language"], Mesh((8,)))


def test_an_activation_between_column_and_row_is_not_annotated_as_a_block():
    """Of a chain of layers every one is a numbered module: its features were gathered behind the activation."""
    with torch.device("meta"):
        chain = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    graph = build_graph(autoshard.capture(chain, torch.empty(32, 64)))
    annotations = manual.fsdp_tensor_parallel(graph, MESH)
    outputs = manual.subtree_outputs(graph)
    assert outputs["1"] not in annotations.pins
    assert annotations.pins[outputs["2"]] == (("data",), ())


def test_vocabulary_parallelism_splits_table_logits_and_loss_and_nothing_else(graphs):
    graph = graphs["language"]
    annotations = manual.vocabulary_parallel(graph, MESH)
    specs = named(graph, annotations)
    assert specs["embed_tokens.weight"] == (("model",), ())
    assert {spec for name, spec in specs.items() if name.startswith("layers")} <= {((), ()), ((),)}
    outputs = manual.subtree_outputs(graph)
    assert annotations.pins[outputs["lm_head"]] == (("data",), (), ("model",))
    assert annotations.pins[outputs["layers.0"]] == (ALL, (), ())
    assert annotations.copies[outputs["norm"], graph.ops[outputs["lm_head"].op].aten] == BATCH
    with pytest.raises(ManualPlanError, match="logits over the vocabulary"):
        manual.vocabulary_parallel(graphs["images"], MESH)


def test_the_plan_that_a_model_carries_is_read_at_capture(graphs):
    graph = graphs["language"]
    assert graph.program.tp_plan == models.Language.tp_plan
    annotations = manual.transformers_plan(graph, MESH)
    specs = named(graph, annotations)
    assert specs["embed_tokens.weight"] == (("model",), ())
    assert specs["layers.0.up_proj.bias"] == (("model",),)
    assert specs["layers.0.down_proj.weight"] == ((), ("model",))
    assert specs["layers.0.down_proj.bias"] == ((),)
    outputs = manual.subtree_outputs(graph)
    assert annotations.pins[outputs["lm_head"]] == BATCH
    assert annotations.pins[outputs["layers.0.norm"]] == SEQUENCE
    with pytest.raises(ManualPlanError, match="carries no tensor parallel plan"):
        manual.transformers_plan(graphs["images"], MESH)


def test_a_style_that_is_not_known_is_named_and_left_out(graphs):
    graph = graphs["language"]
    known = manual.transformers_plan(graph, MESH)
    newer = dict(graph.program.tp_plan) | {"embed_tokens": "colwise_of_tomorrow"}
    newer_graph = replace(graph, program=replace(graph.program, tp_plan=newer))
    with pytest.warns(
        UnknownStyleWarning, match="gives embed_tokens the style 'colwise_of_tomorrow', which is not known"
    ):
        left_out = manual.transformers_plan(newer_graph, MESH)
    expected = named(graph, known)
    assert expected["embed_tokens.weight"] != ((), ())
    table = {"embed_tokens.weight", "embed_tokens.weight.momentum_buffer"}
    assert named(newer_graph, left_out) == {name: ((), ()) if name in table else s for name, s in expected.items()}


def test_the_styles_of_llama_are_known():
    transformers = pytest.importorskip("transformers")
    plan = transformers.LlamaConfig.base_model_tp_plan
    assert len(plan) > 5
    assert set(plan.values()) <= set(_WEIGHT_DIM)


def test_spatial_partitioning_goes_over_to_the_batch_where_the_height_no_longer_divides(graphs):
    graph = graphs["images"]
    annotations = manual.spatial(graph, MESH)
    outputs = manual.module_outputs(graph)
    image = (("data",), (), ("model",), ())
    assert named(graph, annotations)["x"] == image
    assert annotations.pins[outputs["body.0"]] == annotations.pins[outputs["body.2"]] == image
    assert annotations.pins[outputs["body.6"]] == (ALL, (), (), ())
    with pytest.raises(ManualPlanError, match="networks of convolutions"):
        manual.spatial(graphs["language"], MESH)


def test_fsdp_v2_splits_parameters_as_torch_xla_does(graphs):
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import _prepare_spmd_partition_spec

    for name in ("language", "images"):
        graph = graphs[name]
        specs = named(graph, manual.fsdp_v2(graph, MESH))
        for argument in graph.program.arguments:
            if argument.role == "parameter":
                like = torch.empty(argument.type.shape, device="meta")
                marked = _prepare_spmd_partition_spec(like, shard_maximal=True)
                assert specs[argument.name] == tuple(ALL if dim == "fsdp" else () for dim in marked)
    graph = graphs["language"]
    pins = manual.fsdp_v2(graph, MESH).pins
    outputs = manual.subtree_outputs(graph)
    assert pins[outputs["layers.0"]] == pins[outputs["lm_head"]] == (ALL, (), ())
