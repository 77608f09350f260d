"""What all tests share: one thread each, the CPU as the only device, and repeatable hypothesis runs."""

import os

# Before torch, torch_xla or jax is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_DEVICE", "CPU")

from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from autoshard import cli

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, max_examples=1000)  # HYPOTHESIS_PROFILE=search looks for new cases
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

NO_TORCH_XLA = find_spec("torch_xla") is None
OF_TORCH_XLA = {"torch_xla", "_XLAC"}
of_torch_xla = pytest.mark.skipif(NO_TORCH_XLA, reason="about torch_xla itself, which is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A fixture that needs torch_xla skips where there is none; see `_skipped`."""
    with _skipped():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The same of a test."""
    with _skipped():
        return (yield)


@contextmanager
def _skipped():
    """Where torch_xla is absent, what imports it is skipped, and says so; any other error is a failure."""
    try:
        yield
    except Exception as error:
        missing = {getattr(each, "name", None) for each in _chain(error) if isinstance(each, ModuleNotFoundError)}
        if NO_TORCH_XLA and any(name and name.partition(".")[0] in OF_TORCH_XLA for name in missing):
            pytest.skip("needs torch_xla, which is not installed")
        raise


def _chain(error):
    """An error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data beside the checkout that is not part of it (published problems); the test is skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("needs the data directory ../shared, which is not here")
    return SHARED


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """The command line in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return run
