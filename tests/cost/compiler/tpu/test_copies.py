"""What a TPU copies between device memory and on-chip memory, as bytes that are moved and seconds that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cost.compiler.timing import kernel_seconds
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import load_device
from tests.cost.few_ops import compiled_for, f32, ids

pytest.importorskip("libtpu")
jnp = pytest.importorskip("jax").numpy
ROWS, WHOLE = (("data", "model"), ()), ((), ())


def chain(x: object, a: object, b: object, c: object, d: object) -> object:
    h = x @ a
    i = h @ b
    j = i @ c
    return (j @ d) * h * i * j


@pytest.mark.parametrize("rows", [16384, 32768])
def test_what_is_fetched_before_its_reader_is_moved_too(rows: int) -> None:
    # The weights are copied on chip, and were counted only where they are read: 21.0 of 33.6 MB, 37.7 of 50.3.
    arguments = [f32(rows, 1024), *[f32(1024, 1024)] * 4]
    report, _ = compiled_for("tpu-v5e:2x4", chain, arguments, [ROWS, *[WHOLE] * 4])
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.01)


def test_a_copy_runs_beside_what_is_not_bound_by_memory() -> None:
    arguments = [f32(16384, 1024), *[f32(1024, 1024)] * 4]
    report, _ = compiled_for("tpu-v5e:2x4", chain, arguments, [ROWS, *[WHOLE] * 4])
    compiled, device = report.prediction.compiled, load_device("tpu-v5e")
    with_copies = kernel_seconds(compiled, device)
    placement = replace(compiled.placement, copied=({},) * len(compiled.kernels))
    without = kernel_seconds(replace(compiled, placement=placement), device)
    beside = 0
    for copied, seconds, alone in zip(compiled.copied, with_copies, without, strict=True):
        moving = roofline_seconds(0, sum(copied.values()), "f32", device, kernels=0)
        assert (seconds > alone) == bool(copied)
        beside += bool(copied) and seconds - alone < moving / 2
    assert beside


@pytest.mark.parametrize("bags", [256, 2048])
def test_tables_are_copied_beside_the_first_gather_of_indices(bags: int) -> None:
    """All of them, however small it is: 4 and 32 KiB here, three copies of 64 MB; predicted was one at a time."""

    def looked_up(*arguments: object) -> object:
        pairs = zip(arguments[:3], arguments[3:], strict=True)
        return tuple(jnp.take(table, indices, axis=0).sum(1) for table, indices in pairs)

    arguments = [*[f32(1_000_000, 64)] * 3, *[ids(bags, 4)] * 3]
    report, _ = compiled_for("tpu-v5e:2x4", looked_up, arguments, [ROWS] * 6)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.005)
    assert report.prediction.compiled.moved_bytes == pytest.approx(report.judged.bytes, rel=0.04)


@pytest.mark.parametrize("size", [(512, 512), (1024, 1024), (4096, 1000)])
def test_shards_gathered_along_two_dims_are_copied_side_by_side(size: tuple[int, int]) -> None:
    # Nothing was counted: N-BEATS on v5e read weights split in both dims, and took 1.15 times as long as FSDP.
    specs = [ROWS, (("data",), ("model",))]
    report, _ = compiled_for("tpu-v5p:2x2x2", lambda x, w: jnp.tanh(x @ w), [f32(2048, size[0]), f32(*size)], specs)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.02)
    assert report.prediction.compute_s == pytest.approx(report.judged.compute_s, rel=0.3)
