"""Attentions kept as one op as compiled and run: collectives as predicted, numbers as PyTorch's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from autoshard.attention.form import FORWARD, GRADIENT
from autoshard.cost.predict import predict
from autoshard.fused import TARGETS
from autoshard.plans.annotated import annotations_of
from autoshard.plans.json_format import dumps, loads
from autoshard.stablehlo.annotate import AnnotationError, annotate
from autoshard.verify.check import compare_compiled, verify_plan
from autoshard.verify.targets import parse_target
from tests.attention.small import SPLITS, graph_of, source, split
from tests.conftest import of_torch_xla


@of_torch_xla
@pytest.mark.parametrize("how", SPLITS)
def test_numbers_are_those_of_pytorch(how):
    step = source()
    plan = split(graph_of(step, "tpu-v5e"), how, "tpu-v5e")
    report = verify_plan(loads(dumps(plan)), step, "cpu:8", run=True)
    assert report.run is not None
    assert report.run.equal, str(report.run)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize(("device", "target", "kernel"), [
    ("tpu-v5e", "tpu-v5e:2x4", 'custom_call_target="tpu_custom_call"'),
    ("h100", "h100:8", "__cudnn$fmha"),
])  # fmt: skip
def test_each_device_runs_a_fused_kernel_on_its_part(how, device, target, kernel):
    graph = graph_of(source(torch.bfloat16), device, "torchax")
    plan = split(graph, how, device)
    chosen, annotations = parse_target(target), annotations_of(plan, graph)
    module = annotate(graph.program, graph, annotations, plan.mesh, platform=chosen.family)
    report, compiled = compare_compiled(graph, annotations, plan.mesh, chosen, module)
    calls = [line for line in compiled.hlo_text.splitlines() if kernel in line]
    forward, backward = (1, 2) if device == "tpu-v5e" else (1, 1)
    parts = 2 if device == "h100" and "queries" in how else 1  # earlier keys, and the diagonal
    assert len(calls) == 2 * (forward + backward) * parts
    if how == "heads" or device == "tpu-v5e":  # GPU's XLA merges sums over two axes of other ops
        assert report.fidelity.value == 0, str(report.fidelity)
    reduced = {row.kind: row.compiled_bytes for row in report.fidelity.rows}
    assert ("reduce-scatter" in reduced) == (how != "heads")


def test_an_attention_without_annotation_is_refused_and_completed_by_prediction():
    graph = graph_of(source(torch.bfloat16), "h100", "torchax")
    plan = split(graph, "heads", "h100")
    made = annotations_of(plan, graph)
    ops = {op.id for op in graph.ops if op.kind in (FORWARD, GRADIENT)}
    bare = type(made)({value: spec for value, spec in made.pins.items() if value.op not in ops})
    with pytest.raises(AnnotationError, match="complete the annotations first"):
        annotate(graph.program, graph, bare, plan.mesh, platform="gpu")
    found = predict(graph, bare, plan.mesh)
    assert all(found.specs[value][0] == ("data",) for value in made.pins if value.op in ops)


@pytest.mark.parametrize("form", ["gspmd", "shardy"])
def test_regions_in_both_forms(form):
    graph = graph_of(source(torch.bfloat16), "h100", "torchax")
    plan = split(graph, "queries, scattered", "h100")
    made = annotate(graph.program, graph, annotations_of(plan, graph), plan.mesh, form, text=True, platform="gpu")
    text = made.decode()
    assert not any(target in text for target in TARGETS)
    assert text.count("reduce_scatter") == 4
    assert text.count("sdy.manual_computation" if form == "shardy" else "@SPMDFullToShardShape(") >= 4


def test_a_step_in_jax_computes_what_pytorch_does():
    command = [sys.executable, "-m", "tests.regions_in_jax", "tests.attention.small", "queries, scattered", "queries"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["losses"] == pytest.approx(row["expected"], rel=1e-5), row
