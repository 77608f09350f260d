"""What the tests skip where torch_xla is absent."""

import pytest

from autoshard.errors import CaptureError
from tests import conftest


def raised(error, cause=None):
    with conftest._skipped():
        raise error from cause


def test_only_the_import_of_an_absent_torch_xla_is_skipped(monkeypatch):
    missing = ModuleNotFoundError("No module named 'torch_xla.runtime'", name="torch_xla.runtime")
    monkeypatch.setattr(conftest, "NO_TORCH_XLA", True)
    with pytest.raises(pytest.skip.Exception):
        raised(missing)
    with pytest.raises(pytest.skip.Exception):
        raised(CaptureError("capture needs torch_xla"), missing)
    with pytest.raises(CaptureError):
        raised(CaptureError("torch_xla lowered 3 arguments of 4"))
    with pytest.raises(ModuleNotFoundError):
        raised(ModuleNotFoundError("No module named 'jax'", name="jax"))
    monkeypatch.setattr(conftest, "NO_TORCH_XLA", False)
    with pytest.raises(ModuleNotFoundError):
        raised(missing)
