"""Models fitted to measured kernels: safe everywhere, and as far off as their file says."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.machine.collectives import CollectiveKind, seconds
from autoshard.cost.machine.device import load_device
from autoshard.cost.machine.fused_attention import Shape
from autoshard.cost.machine.measured import attention_seconds, curve, matrix_seconds, measured, product_seconds
from autoshard.graph.ops import Op, Value
from autoshard.mesh import Mesh
from autoshard.program import TensorType

KINDS = ["a100-40gb", "a100-80gb", "h100", "h100-96gb", "h200", "b200"]
KIND = st.sampled_from(KINDS)
SIZE = st.integers(1, 1 << 18)
KERNELS: tuple[CollectiveKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
TABLES = [
    path
    for parent in Path(__file__).resolve().parents
    for path in sorted((parent / "shared" / "measured").glob("*.csv.gz"))
]


@given(KIND, st.sampled_from(["bf16", "f32", "i8"]), st.integers(1, 64), SIZE, SIZE, SIZE)
def test_no_product_is_faster_than_the_peak(kind: str, dtype: str, batch: int, m: int, n: int, k: int) -> None:
    device = load_device(kind)
    found = product_seconds(batch, m, n, k, dtype, device)
    assert 2 * batch * m * n * k / device.peak_flops(dtype) < found < math.inf


@given(KIND, SIZE, SIZE, SIZE, st.integers(0, 3))
def test_products_of_twice_the_size_take_longer(kind: str, m: int, n: int, k: int, which: int) -> None:
    """But for what a library's choice of a tile brings: a product that is too small for one is slow."""
    device, sizes = load_device(kind), [1, m, n, k]
    one = product_seconds(*sizes, "bf16", device)  # type: ignore[call-arg,arg-type]
    sizes[which] *= 2
    assert product_seconds(*sizes, "bf16", device) > 0.8 * one  # type: ignore[call-arg,arg-type]
    sizes[which] *= 4
    assert product_seconds(*sizes, "bf16", device) > one  # type: ignore[call-arg,arg-type]


def test_one_more_tile_than_processors_is_another_wave() -> None:
    device = load_device("a100")
    rows = 256 * device.multiprocessors
    full, more = (product_seconds(1, size, 128, 4096, "bf16", device) for size in (rows, rows + 256))
    assert more > 1.1 * full


@given(KIND, st.integers(1, 64), st.integers(0, 14), st.integers(0, 6), st.sampled_from([64, 80, 128, 256]))
def test_no_attention_is_faster_than_the_peak_and_longer_ones_take_longer(
    kind: str, batch: int, length: int, heads: int, features: int
) -> None:
    device = load_device(kind)

    def took(length: int) -> float:
        attended = length * (length + 1) / 2
        shape = Shape(batch, 2**heads, 1, length, length, features, attended, length)
        found = attention_seconds(shape, "bf16", device)
        assert 4 * batch * 2**heads * attended * features / device.peak_flops("bf16") < found < math.inf
        return found

    assert took(2**length) <= took(2 ** (length + 1))


@pytest.mark.parametrize(("kind", "collective", "group"), [*product(KINDS, KERNELS, range(2, 9))])
def test_collectives_take_longer_for_more_bytes(kind: str, collective: CollectiveKind, group: int) -> None:
    found = curve(collective, group, load_device(kind))
    assert found is not None
    times = [found.seconds(2.0**size) for size in range(10, 40)]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", ["h100", "h200"])
def test_a_sum_on_eight_hoppers_is_less_than_two_gathers(kind: str) -> None:
    """Their switch adds."""
    mesh, device = Mesh((8,), ("x",), kind), load_device(kind)
    whole, half = (seconds(each, ("x",), 2**28, mesh, device) for each in ("all-reduce", "all-gather"))  # type: ignore[arg-type]
    assert whole < 1.6 * half


@pytest.mark.parametrize(("kind", "name"), [("all-gather", "h100:2x8"), ("collective-permute", "h100:8")])
def test_between_hosts_and_of_permutes_the_links_count(kind: CollectiveKind, name: str) -> None:
    device = load_device(name)
    mesh = Mesh((device.devices or 1,), ("x",), name)
    found, expected = (seconds(kind, ("x",), 2**28, mesh, each) for each in (device, replace(device, measured="")))
    assert found == expected


def dot(m: int, n: int, k: int) -> Op:
    attrs = {"lhs_batch": (), "rhs_batch": (), "lhs_contract": (1,), "rhs_contract": (0,)}
    return Op(2, "dot_general", (Value(0), Value(1)), (TensorType((m, n), "bf16"),), attrs)


def test_what_was_not_measured_takes_its_flops_at_the_achievable_rate() -> None:
    for kind in ("l40s", "cpu"):
        device = load_device(kind)
        assert matrix_seconds(dot(8, 8, 8), [(8, 8), (8, 8)], 1e9, "bf16", device) == 1e9 / device.reachable_flops(
            "bf16"
        )
    tpu = load_device("tpu-v5e")  # its model is of floats: integers run at twice the rate
    assert matrix_seconds(dot(8, 8, 8), [(8, 8), (8, 8)], 1e9, "i8", tpu) == 1e9 / tpu.reachable_flops("i8")
    h100 = load_device("h100")
    found = matrix_seconds(dot(512, 4096, 1024), [(512, 1024), (1024, 4096)], 2 * 512 * 4096 * 1024, "bf16", h100)
    known = measured("h100")
    assert known is not None
    assert found == product_seconds(1, 512, 4096, 1024, "bf16", h100) - known.products.launch


@pytest.mark.skipif(not TABLES, reason="the measured tables are not beside this checkout")
def test_errors_are_those_that_the_file_states() -> None:
    pytest.importorskip("scipy")
    from benchmarks.fit_kernels import read

    for kind, fit in read(map(str, TABLES), [], anew=False, held_out=True).items():
        known = measured(kind)
        assert known is not None
        for name, found in fit.errors().items():
            assert found == pytest.approx(known.errors[name], abs=0.004), (kind, name)
