"""What all tests share: one thread each, the CPU as the only device, and repeatable hypothesis runs."""

import os
import sys

# Before torch, torch_xla or jax is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_DEVICE", "CPU")

from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from autoshard.cli import commands as cli

MORE = int(os.environ.get("AUTOSHARD_EXAMPLES", "1"))
"""How many times as many cases properties are tried on; others each time, where more than once (`make hypothesis`)."""
settings.register_profile(
    "tests", deadline=None, derandomize=MORE == 1, max_examples=50 * MORE, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

NO_TORCH_XLA = find_spec("torch_xla") is None
OF_TORCH_XLA = {"torch_xla", "_XLAC"}
FRONTENDS = [name for name in ("torch_xla", "torchax") if find_spec(name) is not None]
"""Those installed. None is imported to see: torchax makes jax a device of torch, which other tests must not find."""
of_torch_xla = pytest.mark.skipif(NO_TORCH_XLA, reason="about torch_xla itself, which is not installed")


COMPILES = {"compile_module", "compile_for", "compare_compiled", "verify_plan", "run_equal", "subprocess", "verify"}
"""What compiles for a target, or starts a process: the tests of a module that names one are marked, with what it takes
from other modules of tests."""


def pytest_collection_modifyitems(items):
    """Mark what `make check` leaves out."""
    for item in items:
        if _compiles(item.module):
            item.add_marker(pytest.mark.compiles)


@cache
def _compiles(module) -> bool:
    helpers = {getattr(each, "__module__", getattr(each, "__name__", None)) for each in vars(module).values()}
    helpers = {name for name in helpers - {module.__name__} if str(name).startswith("tests.")}
    return not COMPILES.isdisjoint(vars(module)) or any(_compiles(sys.modules[name]) for name in helpers)


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


@pytest.fixture(autouse=True)
def keeps_devices():
    """No test leaves torch with torchax's device."""
    yield
    assert not hasattr(sys.modules.get("torch"), "jax"), "this test imported torchax: see FRONTENDS"


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
