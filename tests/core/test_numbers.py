"""A step captured without torch_xla, run by jax, is the step that PyTorch takes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.core import nets

if find_spec("torchax") is None:
    pytest.skip("captures through torchax, which is not installed", allow_module_level=True)
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("numbers") / "numbers.json"
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-m", "tests.core.numbers", str(out)], check=True, cwd=root, env=environment)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", nets.NETS)
def test_three_steps_are_those_of_eager_pytorch(found, name):
    assert found[name]["moved"] > 1e-2  # the steps did something
    assert found[name]["loss"] < 2e-6
    assert found[name]["tensors"] < 5e-6
