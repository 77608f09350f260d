"""How far off figures may be: what bars cover, and where they are shown."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.comparison.compared import compare
from autoshard.cost.machine.bars import Bars, bar_text, bars_of
from autoshard.cost.machine.device import load_device

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
STEPS = ROOT.parent / "shared" / "measured" / "steps.json"
KINDS = {"A100-SXM-40GB": "a100-40gb", "A100-SXM-80GB": "a100-80gb", "H100-SXM": "h100", "H100-96GB": "h100-96gb"}
TPUS = {"TPU v4": "tpu-v4", "TPU v5e": "tpu-v5e", "TPU v5p": "tpu-v5p"}


@given(st.sampled_from(["h100", "tpu-v5e", "l40s", "cpu"]), st.floats(0, 1))
def test_what_was_not_measured_is_less_sure(kind, share):
    """A step is as sure as measured steps, and less so by the share of kernels that none of them had."""
    sure, unsure = bars_of(load_device(kind), 0.0), bars_of(load_device(kind), share)
    assert sure.step <= unsure.step <= 1.0
    assert (sure.level == "datasheet") == (kind in ("l40s", "cpu"))
    assert bars_of(load_device(kind), 1.0).level == "datasheet"


@given(st.floats(1e-6, 1e3), st.floats(0.5, 2))
def test_a_tie_is_one_both_ways(seconds, ratio):
    bars = Bars(step=0.2, memory=0.1, tie=0.15, level="measured steps")
    assert bars.tied(seconds, ratio * seconds) == bars.tied(ratio * seconds, seconds)
    if not 0.86 < ratio < 1.16:
        assert not bars.tied(seconds, ratio * seconds)


def test_text():
    assert bar_text(0.2) == "± 20 %"
    assert bar_text(1.0) == "within a factor of 2"


@pytest.mark.skipif(not STEPS.exists(), reason="needs ../shared")
def test_bars_hold_for_measured_steps():
    """Of the steps that others measured, as they are predicted, nine of ten lie within the bar of their kind."""
    lines = [json.loads(line) for line in (RESULTS / "published.jsonl").read_text().splitlines()]
    ratios = {line["id"]: line["ratio"] for line in lines if "ratio" in line}
    inside = []
    for row in json.loads(STEPS.read_text()):
        if row["id"] in ratios:
            kind = next(kind for start, kind in (KINDS | TPUS).items() if row["hardware"].startswith(start))
            bar = bars_of(load_device(kind), 0.0).step
            inside.append(1 / (1 + bar) <= ratios[row["id"]] <= 1 + bar)
    assert len(inside) > 150
    assert 0.85 <= sum(inside) / len(inside) <= 0.95


@pytest.mark.parametrize("target", ["cpu", "gpu", "tpu"])
def test_bars_hold_for_memory(target):
    """Memory as compiled lies within the bar in nine of ten rows of each file, on average over files."""
    shares = []
    for name in ("bf16_gpu", "bf16_tpu", "compiled", "held_out", "quality", "real"):
        inside = []
        for row in csv.DictReader((RESULTS / f"{name}.csv").open(newline="")):
            device = load_device(row["target"] if "target" in row else row["row"].partition("/")[2])
            if device.target == target and row["compiled_memory"]:
                ratio, bar = float(row["predicted_memory"]) / float(row["compiled_memory"]), bars_of(device, 0).memory
                inside.append(1 / (1 + bar) <= ratio <= 1 + bar)
        shares += [sum(inside) / len(inside)] if inside else []
    assert 0.85 <= sum(shares) / len(shares) <= 0.95


class _Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(64, 256, 3), nn.Conv2d(256, 256, 3))

    def forward(self, x):
        return self.layers(x)


def test_a_plan_says_how_sure_it_is(tmp_path):
    """In its report, its file and its comparison; a net of convolutions is less sure."""
    linear = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    plan = autoshard.plan(linear, torch.zeros(64, 1024), mesh="2x4", device="h100")
    bars = Bars.of_info(plan.info)
    assert bars is not None
    assert bars.level == "measured steps"
    assert f"{bars.step_text()};" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Bars.of_info(autoshard.Plan.load(tmp_path / "plan.json").info) == bars
    assert "±" not in str(replace(plan, info={}))

    images = autoshard.plan(_Convolutions(), torch.zeros(64, 64, 32, 32), mesh="2x4", device="h100")
    unsure = Bars.of_info(images.info)
    assert unsure is not None
    assert unsure.step > bars.step

    found = compare(linear, torch.zeros(64, 1024), mesh="2x4", device="h100", plans=["auto", "dp"])
    assert found.bars is not None
    assert found.tied() == found.bars.tied(found["auto"].predicted.overlapped_s, found["dp"].predicted.overlapped_s)
    assert found.to_dict()["tie"]["predicted"] == found.tied()
    assert found.bars.tie_text() in str(found)
