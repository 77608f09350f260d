"""A mixture's experts kept as one op as compiled and run: collectives as predicted, numbers as PyTorch's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from autoshard.api import manual_plan
from autoshard.attention.form import FORWARD
from autoshard.mesh import Mesh
from autoshard.plans.annotated import annotations_of
from autoshard.plans.json_format import dumps, loads
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import compare_compiled, verify_plan
from autoshard.verify.targets import parse_target
from tests.conftest import of_torch_xla
from tests.experts.small import SPLITS, gpt_oss, graph_of, source, split


@of_torch_xla
@pytest.mark.parametrize(("made", "how"), [
    (source, "experts, scattered"), (source, "experts and features"),
    (gpt_oss, "experts, scattered"), (gpt_oss, "features"),
])  # fmt: skip
def test_numbers_are_those_of_pytorch(made, how):
    step = made()
    plan = split(graph_of(step, "tpu-v5e"), how, "tpu-v5e")
    report = verify_plan(loads(dumps(plan)), step, "cpu:8", run=True)
    assert report.run is not None
    assert report.run.equal, str(report.run)


@of_torch_xla
def test_a_plan_by_hand_says_nothing_of_what_is_computed_again_for_nothing():
    """Mixtral under checkpoints: the second pass computes its experts, of which the backward pass reads no result."""
    step = source()
    step.model.gradient_checkpointing_enable()
    graph = graph_of(step, "tpu-v5e")
    plan = manual_plan("fsdp", graph.program, Mesh((2, 4), device="tpu-v5e"))
    report = verify_plan(loads(dumps(plan)), step, "tpu-v5e:2x4")
    assert report.fidelity.value < 0.05


@pytest.mark.parametrize(("made", "how"), [*((source, how) for how in SPLITS), (gpt_oss, "experts and features")])
@pytest.mark.parametrize(("device", "target", "kernel"), [
    ("tpu-v5e", "tpu-v5e:2x4", 'custom_call_target="tpu_custom_call"'),
    ("h100", "h100:8", 'custom_call_target="__gpu$xla.gpu.triton"'),
])  # fmt: skip
def test_each_device_runs_grouped_products_of_its_part(made, how, device, target, kernel):
    graph = graph_of(made(torch.bfloat16), device, "torchax")
    plan = split(graph, how, device)
    chosen, annotations = parse_target(target), annotations_of(plan, graph)
    module = annotate(graph.program, graph, annotations, plan.mesh, platform=chosen.family)
    report, compiled = compare_compiled(graph, annotations, plan.mesh, chosen, module)
    calls = [line for line in compiled.hlo_text.splitlines() if kernel in line]
    attentions = sum(op.kind == FORWARD for op in graph.ops) if device == "tpu-v5e" else 0
    assert len(calls) == 2 * (2 + 5) + 3 * attentions  # products of a layer's forward and backward pass
    for kind in ("all-reduce", "reduce-scatter"):  # a TPU scatters lanes in whole tiles alone
        sums = [row for row in report.fidelity.rows if row.kind == kind]
        assert sum(row.predicted_bytes for row in sums) == pytest.approx(sum(row.compiled_bytes for row in sums), 0.02)
    gathered = report.fidelity.predicted_bytes - report.fidelity.compiled_bytes  # of the routers' choices, a few bytes
    assert abs(gathered) <= 0.04 * report.fidelity.compiled_bytes
    assert report.judged.flops == pytest.approx(report.prediction.compiled.flops, rel=0.05)


@pytest.mark.parametrize("made", [source, gpt_oss])
def test_weights_of_both_passes_are_gathered_once_however_far_apart(made):
    graph = graph_of(made(torch.bfloat16), "tpu-v5e", "torchax")
    plan = manual_plan("fsdp", graph.program, Mesh((2, 4), device="tpu-v5e"))
    chosen, annotations = parse_target("tpu-v5e:2x4"), annotations_of(plan, graph)
    module = annotate(graph.program, graph, annotations, plan.mesh, platform=chosen.family)
    report, _ = compare_compiled(graph, annotations, plan.mesh, chosen, module)
    assert report.fidelity.value < 0.01  # 0.21 and 1.03 where each pass gathers, and sums are scattered along any dim


def test_a_sum_scattered_over_a_whole_torus_is_compiled_as_an_all_reduce():
    graph = graph_of(source(torch.bfloat16), "tpu-v5p", "torchax")
    plan = split(graph, "tokens, scattered", "tpu-v5p")
    chosen, annotations = parse_target("tpu-v5p:2x2x2"), annotations_of(plan, graph)
    module = annotate(graph.program, graph, annotations, plan.mesh, platform=chosen.family)
    report, _ = compare_compiled(graph, annotations, plan.mesh, chosen, module)
    (sums,) = (row for row in report.fidelity.rows if row.kind in ("all-reduce", "reduce-scatter"))
    assert sums.kind == "all-reduce"
    assert sums.predicted_bytes == pytest.approx(sums.compiled_bytes, rel=1e-3)


def test_a_step_in_jax_computes_what_pytorch_does():
    command = [sys.executable, "-m", "tests.regions_in_jax", "tests.experts.small", "experts, scattered", "features"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["losses"] == pytest.approx(line["expected"], rel=1e-5), line["how"]
