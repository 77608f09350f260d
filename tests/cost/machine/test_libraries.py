"""Seconds of attention by library."""

from __future__ import annotations

from dataclasses import fields

import pytest

from autoshard.attention.form import FORWARD, GRADIENT, Form
from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.libraries import library
from autoshard.cost.machine.measured import matrix_seconds
from autoshard.graph.ops import Op
from autoshard.program import TensorType

FLOPS = 1e12


def seconds(name, device, *, kind=FORWARD, causal=True, length=4096, size=128, dtype="bf16"):
    attrs = {each.name: getattr(Form(1.0, causal), each.name) for each in fields(Form)}
    op = Op(0, kind, (), (TensorType((1,), dtype),), attrs)
    shapes = ((1, 8, 1, length, size), (1, 8, length, size), (1, 8, length, size))
    known = matrix_seconds if name is None else library(name)
    return known(op, shapes, FLOPS, dtype, load_device(device))


@pytest.mark.parametrize("kind", [FORWARD, GRADIENT])
@pytest.mark.parametrize("size", [64, 128])
def test_libraries_are_ordered_as_they_were_published(kind, size):
    cudnn, flash, triton = (seconds(name, "h100", kind=kind, size=size) for name in ("cudnn", "flash", "triton"))
    assert cudnn < flash < triton
    assert seconds("flash", "a100-80gb", kind=kind, size=size) < seconds("triton", "a100-80gb", kind=kind, size=size)


@pytest.mark.parametrize(
    ("name", "device"), [("cudnn", "h100"), ("flash", "h100"), ("triton", "h100"), ("flash", "a100-80gb")]
)
def test_longer_sequences_run_at_higher_rates_up_to_the_peak(name, device):
    taken = [seconds(name, device, length=2**power) for power in range(8, 13)]
    assert taken == sorted(taken, reverse=True)
    assert FLOPS / taken[-1] < load_device(device).peak_flops("bf16")
    assert seconds(name, device, length=2**18) == seconds(name, device, length=2**14)


def test_a_mask_makes_flops_slower():
    assert seconds("flash", "h100", causal=False) < seconds("flash", "h100")


def test_the_published_rate_of_both_passes_is_kept_on_an_a100():
    forward, backward = (
        seconds("triton", "a100-80gb", kind=kind, size=64, length=8192) for kind in (FORWARD, GRADIENT)
    )
    assert 3.5 * FLOPS / (forward + 2.5 * backward) == pytest.approx(79e12)  # arXiv:2307.08691, figure 4 (c)


@pytest.mark.parametrize(("device", "dtype"), [("b200", "bf16"), ("h100", "f32")])
def test_what_no_library_was_measured_for_takes_the_model(device, dtype):
    assert seconds("flash", device, dtype=dtype) == seconds(None, device, dtype=dtype)
