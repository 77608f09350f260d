"""Reshards of many pairs are kept on disk, and no file there can do harm."""

import gzip
from fractions import Fraction

import numpy as np
import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.reshard import price as reshard
from autoshard.cost.partitioner.reshard.step_tables import Step, step_table
from autoshard.mesh import AxisPart, Mesh

SIZE = 50
ALL = np.ones((SIZE, SIZE), dtype=np.bool_)


def steps(i, j):
    return () if i < j else (Step("all-gather", ("data", AxisPart(("model",), 2, 4)), Fraction(i, 3 + j % 5)),)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    return tmp_path


def same(one, other):
    return all(
        one.ways[one.index[i, j]] == other.ways[other.index[i, j]] for i in range(SIZE) for j in range(SIZE) if i != j
    )


def test_a_table_is_made_once(cache):
    made = step_table("key", SIZE, steps, ALL)

    def never(i, j):
        raise AssertionError("it is on disk")

    assert same(step_table("key", SIZE, never, ALL), made)
    assert all(made.ways[made.index[i, j]] == steps(i, j) for i in range(SIZE) for j in range(SIZE) if i != j)
    with pytest.raises(AssertionError, match="it is on disk"):
        step_table("another key", SIZE, never, ALL)


def damaged_stream(path):
    """The compressed bytes, damaged where only zlib notices."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(gzip.compress(b"[]")),
        lambda path: path.write_bytes(path.read_bytes().partition(b"\n")[2]),
        damaged_stream,
    ],
)
def test_a_spoilt_file_is_made_again(cache, spoil):
    made = step_table("key", SIZE, steps, ALL)
    (path,) = (cache / "reshards").iterdir()
    spoil(path)
    assert same(step_table("key", SIZE, steps, ALL), made)
    assert same(step_table("key", SIZE, lambda i, j: (), ALL), made)


def test_without_a_place_to_keep_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "file"))
    assert same(step_table("key", SIZE, steps, ALL), step_table("key", SIZE, steps, ALL))


def test_a_table_from_the_disk_prices_as_the_one_that_was_made(cache):
    mesh, device = Mesh((2, 2, 2), device="h100"), load_device("h100")
    specs = reshard.specs_over(2, mesh.axis_names)
    made = reshard.affine_table(specs, mesh, device, None)
    assert len(list((cache / "reshards").iterdir())) == 1
    again = reshard.affine_table(specs, mesh, device, None)
    assert all(np.array_equal(one, other) for one, other in zip(made, again, strict=True))
    for i, j in ((0, 5), (7, 3), (20, 30)):
        entry = reshard.affine(specs[i], specs[j], mesh, device, None)
        assert (made[0][i, j], made[1][i, j]) == pytest.approx((entry.alpha, entry.beta))
