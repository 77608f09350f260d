"""What sparse cores do beside a TPU's other kernels: copies of large narrow tables, and lookups of many rows."""

from __future__ import annotations

import re

import pytest

from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.schedule import dependencies
from autoshard.cost.compiler.tpu.sparse_copies import COPIED, _Backwards
from autoshard.cost.machine.device import load_device
from tests.cost.few_ops import compiled_for, f32, ids

pytest.importorskip("libtpu")
jax = pytest.importorskip("jax")
jnp = jax.numpy

V5P = "tpu-v5p:2x2x2"
WHOLE = ((), ())


def sums(i: object, *tables: object) -> object:
    """Sums of rows of each table, one lookup after another."""
    x = jnp.zeros(tables[0].shape[1:], jnp.float32)  # type: ignore[attr-defined]
    for table in tables:
        x = jnp.tanh(x + table.at[i].get(mode="promise_in_bounds").sum(0))  # type: ignore[attr-defined]
    return x


@pytest.mark.parametrize(("rows", "copies"), [(190_000, 1), (400_000, 4)])
def test_large_narrow_tables_are_all_copied_at_the_start(rows: int, copies: int) -> None:
    """By sparse cores, where nothing takes long meanwhile (DLRM's data parallelism on v5p: −21.8, now +1.1)."""
    report, _ = compiled_for(V5P, sums, [ids(512), *[f32(rows, 64)] * 4], [((),), *[WHOLE] * 4])
    held = report.memory_bytes - 4 * rows * 64 * 4
    assert held == pytest.approx(copies * rows * 128 * 4, rel=0.02)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.02)


@pytest.mark.parametrize(("columns", "apart"), [(48, True), (64, True), (72, False), (96, False)])
def test_sparse_cores_copy_rows_of_64_numbers_at_most(columns: int, apart: bool) -> None:
    report, _ = compiled_for(V5P, sums, [ids(512), *[f32(300_000, columns)] * 2], [((),), *[WHOLE] * 2])
    kinds = [kernel.kind for kernel in report.prediction.compiled.kernels]
    assert kinds.count(COPIED) == 2 * apart
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.02)


@pytest.mark.parametrize(("rows", "indices", "apart"), [(100_000, 1024, 0), (100_000, 2048, 4), (1000, 2048, 0)])
def test_lookups_of_many_rows_run_on_sparse_cores(rows: int, indices: int, apart: int) -> None:
    """DLRM's automatic plan on v5p was 12 % too low."""
    report, compiled = compiled_for(V5P, sums, [ids(indices), *[f32(rows, 64)] * 4], [((),), *[WHOLE] * 4])
    assert len(re.findall(r"%gather_offload_async_done[.0-9]* =", compiled.hlo_text)) == apart
    kinds = [kernel.kind for kernel in report.prediction.compiled.kernels]
    assert kinds.count(COPIED) == apart


def test_kinds_without_sparse_cores_copy_none() -> None:
    assert not load_device("tpu-v5e").sparse_copy_bytes
    assert not load_device("tpu-v4").sparse_copy_bytes
    assert load_device("tpu-v5p").sparse_copy_bytes < load_device("tpu-v6e").sparse_copy_bytes


class Program:
    """Kernels in the order in which they run, each with one result that is called as it is."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kernels: list[Kernel] = []
        self.takes: list[float] = []
        self.apart: dict[int, float] = {}

    def add(self, name: str, *reads: str, us: float = 0.0, apart: float = 0.0) -> None:
        """One kernel; `apart`: microseconds of one that sparse cores run."""
        number = len(self.names)
        self.names.append(name)
        self.kernels.append(Kernel((), tuple(self.names.index(read) for read in reads), (number,), "copy", number))
        self.takes.append(us)
        if apart:
            self.apart[number] = apart

    def scheduled(self) -> list[str]:
        """Names in the order chosen; `end of` one that runs apart."""
        order = _Backwards(range(len(self.names)), dependencies(self.kernels), self.takes, self.apart).placed()
        return [f"end of {self.names[number]}" if end else self.names[number] for number, end in order]


def test_a_copy_starts_as_long_before_its_end_as_it_takes() -> None:
    """A chain of loops with two lookups in it, each right behind the copy of its table: as compiled for v5p."""
    program = Program()
    before: tuple[str, ...] = ()
    for number in range(12):
        program.add(f"loop{number}", *before, us=7)
        before = (f"loop{number}",)
        if number in (2, 10):
            program.add(f"copy{number}", apart=27)
            program.add(f"lookup{number}", f"copy{number}", *before)
            before = (f"lookup{number}",)
    order = program.scheduled()
    early = ["copy2", "loop0", "loop1", "loop2", "end of copy2", "lookup2"]
    late = ["copy10", *(f"loop{number}" for number in range(7, 11)), "end of copy10", "lookup10", "loop11"]
    assert order == [*early, *(f"loop{number}" for number in range(3, 7)), *late]


def test_updates_wait_for_the_scatters_of_all_tables() -> None:
    """Four tables: what reads a copy comes after the scatters that nothing else waits for, as compiled for v5p."""
    program = Program()
    for number in range(4):
        program.add(f"scatter{number}")
        program.add(f"copy{number}", f"scatter{number}", apart=77)
        program.add(f"update{number}", f"copy{number}", us=1000)
    order = program.scheduled()
    assert order[:5] == ["scatter0", "copy0", "scatter1", "scatter2", "scatter3"]
    assert order[5:] == [
        *("end of copy0", "copy1", "update0", "end of copy1", "copy2", "update1"),
        *("end of copy2", "copy3", "update2", "end of copy3", "update3"),
    ]
