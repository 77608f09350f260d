"""Seconds of a TPU's kernels, by the model of libtpu's estimates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.machine import cycles
from autoshard.cost.machine.cycles import CLASSES, Done, Products
from autoshard.cost.machine.device import load_device

KINDS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
SIZES = st.integers(1, 1 << 15)


def taken(kind: str, done: Done, moved: float = 0.0) -> float:
    model = cycles.model(kind)
    assert model is not None
    return cycles.kernel_seconds(done, moved, model.constants, load_device(kind))


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        ((8192, 4096, 4096), 0.97), ((8192, 4096, 14336), 0.98), ((4096, 768, 768), 0.62), ((4096, 768, 96), 0.35),
        ((4096, 768, 128), 0.40), ((4096, 96, 768), 0.10), ((512, 4096, 4096), 0.92),
    ],
)  # fmt: skip
def test_narrow_products_reach_the_share_of_peak_that_libtpu_gives_them(
    sizes: tuple[int, int, int], share: float
) -> None:
    """Shares of a v5e's peak that libtpu estimated of bf16 products compiled alone; none was fitted.

    It copied the first operand on chip before.
    """
    m, k, n = sizes
    device = load_device("tpu-v5e")
    found = taken("tpu-v5e", Done((Products(1, m, n, k, True),)), 2.0 * (k * n + m * n))
    reached = 2 * m * k * n / device.peak_flops("bf16") / found
    assert abs(math.log(reached / share)) < 0.35


@pytest.mark.parametrize(
    ("m", "n", "k", "estimate"),
    [
        (12288, 32768, 5120, 37_829_760), (32768, 5120, 12288, 34_691_744), (12288, 5120, 32768, 33_290_844),
        (12288, 5120, 8192, 8_960_604), (5120, 8192, 12288, 8_680_424), (8192, 5120, 12288, 8_645_830),
    ],
)  # fmt: skip
def test_packing_is_not_hidden_where_all_arrays_are_in_device_memory(m: int, n: int, k: int, estimate: int) -> None:
    """Kernels of MaxText's 16B under FSDP on two v5e pods, by libtpu: they suggested the form, none was fitted."""
    moved = 2.0 * (m * k + k * n + m * n)
    page = 4 * cycles.TILE
    known = Done((Products(1, m, n, k, True),), {"read": 2.0 * (m * k + k * n) / page, "written": 2.0 * m * n / page})
    for done in (known, Done(known.products)):
        found = taken("tpu-v5e", done, moved) * load_device("tpu-v5e").clock
        assert abs(math.log(found / estimate)) < 0.08


@pytest.mark.parametrize(
    ("images", "read", "made", "window", "positions", "spread", "estimate"),
    [
        (16, 256, 320, (7, 7), (8, 8), 1, 76032), (8, 192, 64, (3, 3), (56, 8), 1, 16384),
        (8, 320, 160, (7, 7), (8, 8), 1, 37888), (8, 64, 192, (3, 3), (56, 8), 1, 11008),
        (8, 160, 320, (7, 7), (8, 8), 1, 23536), (16, 320, 256, (7, 7), (16, 16), 2, 151040),
        (8, 3, 48, (7, 7), (48, 48), 1, 75264), (8, 3, 64, (5, 5), (64, 64), 1, 66560),
        (256, 16, 320, (8, 8), (7, 7), 1, 70436),
    ],
)  # fmt: skip
def test_each_tap_of_a_window_is_a_pass_of_its_own_with_padded_features(
    images: int, read: int, made: int, window: tuple[int, int], positions: tuple[int, int], spread: int, estimate: int
) -> None:
    """Cycles of a v5e's convolutions of f32 results, compiled alone: 64 features take as long as 128, if not shared.

    Two share passes between taps, one has base dilation, two read three features; the last is a kernel's gradient.
    """
    attrs = {"rhs": range(4), "out": range(4), "lhs_dilation": (spread, spread), "feature_groups": 1}
    done = cycles.convolved((made, read, *window), (images, made, *positions), attrs, narrow=False)
    found = taken("tpu-v5e", Done((done,))) * load_device("tpu-v5e").clock
    assert abs(math.log(found / estimate)) < 0.2


@pytest.mark.parametrize("kind", KINDS)
@given(batch=st.integers(1, 64), m=SIZES, k=SIZES, n=SIZES, narrow=st.booleans())
def test_a_product_takes_no_less_than_at_peak_and_more_if_larger(
    kind: str, batch: int, m: int, k: int, n: int, narrow: bool
) -> None:
    device = load_device(kind)
    found = cycles.product_seconds(Products(batch, m, n, k, narrow), device)
    assert math.isfinite(found)
    assert found >= 2 * batch * m * k * n / device.peak_flops("bf16") * (1 - 1e-9)
    of_a_vector = min(m, n) == 1
    rows = () if of_a_vector else ((batch, 2 * m, n, k), (batch, m, 2 * n, k))
    for larger in ((2 * batch, m, n, k), *rows, (batch, m, n, 2 * k)):
        assert cycles.product_seconds(Products(*larger, narrow), device) >= found


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_kernel_does_more_takes_no_less_time(kind: str) -> None:
    base = dict.fromkeys(CLASSES, 1000.0)
    first = taken(kind, Done((), base), 1e6)
    assert taken(kind, Done((), base), 1e9) > first
    for name in CLASSES:
        assert taken(kind, Done((), {**base, name: 2000.0}), 1e6) > first


@pytest.mark.parametrize(("kind", "microseconds"), [("tpu-v5e", 80), ("tpu-v5p", 29), ("tpu-v6e", 43)])
def test_a_matrix_vector_product_runs_in_the_vector_unit(kind: str, microseconds: float) -> None:
    """An eighth of a head of 16,032 x 4,096 in bf16, as libtpu estimated it; of two rows it takes a third."""
    sizes = 2004, 4096
    one, two = (
        taken(kind, Done((Products(1, m, *sizes, narrow=True),)), moved=2 * math.prod(sizes)) * 1e6 for m in (1, 2)
    )
    assert one == pytest.approx(microseconds, rel=0.25)
    assert two < one / 2


def test_the_gradient_of_a_depthwise_kernel_is_no_matrix_vector_product() -> None:
    """ConvNeXt's 7 x 7 kernels of 384 features, 4 images of 28 x 28 a device: 20.5 us by libtpu's estimate for v5e."""
    dims = {"lhs": (1, 0, 2, 3), "rhs": (1, 0, 2, 3), "out": (2, 3, 0, 1), "lhs_dilation": (1, 1)}
    done = cycles.convolved(
        (4, 384, 28, 28), (7, 7, 1, 384), {**dims, "feature_groups": 1, "batch_groups": 384}, narrow=True
    )
    assert 20.5e-6 / 2 < cycles.product_seconds(done, load_device("tpu-v5e")) < 2 * 20.5e-6


def test_a_kind_without_a_model_has_none() -> None:
    assert cycles.model("h100") is None
    assert cycles.model("a tpu of my own") is None


def test_ops_are_classed_alike_in_programs_and_in_compiled_text() -> None:
    assert [cycles.class_of(kind) for kind in ("exponential", "add", "convert", "transpose", "dot_general")] == [
        "slow", "simple", "converted", "moved", None,
    ]  # fmt: skip


def test_a_device_of_a_kind_without_its_clock_has_no_model() -> None:
    device = load_device("tpu-v5e")
    assert cycles.model_of(device) is not None
    assert cycles.model_of(replace(device, clock=0.0)) is None
