"""Figures read off libtpu: what each must say, and what happens where they are of another kind or version."""

import tomllib
from dataclasses import replace
from importlib import resources

import pytest

from autoshard.cost.compiler.backends import backend_of
from autoshard.cost.compiler.tpu.backend import CoarseTpuBackend, TpuBackend
from autoshard.cost.machine import figures
from autoshard.cost.machine.device import builtin_kinds, load_device

DOCUMENT = tomllib.loads(resources.files("autoshard.cost.machine").joinpath("libtpu.toml").read_text())
NAMES = [name for name, entry in DOCUMENT.items() if isinstance(entry, dict)]


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a version of libtpu is installed."""
    figures.are_known.cache_clear()
    yield lambda version: monkeypatch.setattr(figures.metadata, "version", lambda name: version)
    figures.are_known.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_what_it_is(name):
    entry = DOCUMENT[name]
    assert {"value", "unit", "source", "error"} <= entry.keys() <= {"value", "unit", "source", "error", "kinds"}
    assert set(entry.get("kinds", ())) <= builtin_kinds()
    assert all(entry[field] for field in ("unit", "source", "error"))


def test_a_kind_that_was_measured_has_its_own_figure():
    values = {kind: figures.of_kind("reduce_scatter_buffer", kind) for kind in ("tpu-v5e", "tpu-v5p", "tpu-v6e")}
    assert values["tpu-v5e"] == values["tpu-v5p"] != values["tpu-v6e"]


def test_another_kind_or_version_takes_the_coarse_model_and_says_so(installed):
    device = load_device("tpu-v5e:2x4")
    installed(DOCUMENT["versions"][0])
    assert type(backend_of(device)) is TpuBackend
    with pytest.warns(UserWarning, match=r"tpu-v9 under libtpu .* coarse model"):
        assert type(backend_of(replace(device, name="tpu-v9"))) is CoarseTpuBackend
    figures.are_known.cache_clear()
    installed("9.9")
    with pytest.warns(UserWarning, match=r"tpu-v5e under libtpu 9\.9 .* coarse model"):
        assert type(backend_of(device)) is CoarseTpuBackend
