"""The benchmarks: plans are made for the machine that they are compiled for."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a script of `benchmarks/`, which stand beside one another."""
    pytest.importorskip("tabulate")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield __import__
    for name in [name for name, module in sys.modules.items() if _of_benchmarks(module)]:
        del sys.modules[name]


def _of_benchmarks(module):
    return Path(getattr(module, "__file__", None) or "/").parent == ROOT / "benchmarks"


@pytest.mark.parametrize(("target", "kind"), [("h100:2x4", "h100:2x4"), ("tpu-v5e:4x2", "tpu-v5e:4x2"), ("cpu", "cpu")])
def test_plans_are_made_for_the_topology_that_they_are_compiled_for(benchmark, monkeypatch, target, kind):
    compiled = benchmark("compiled")
    seen = []
    monkeypatch.setattr(compiled, "annotations", lambda name, graph, mesh: seen.append(mesh))
    monkeypatch.setattr(compiled, "measured_plan", lambda graph, chosen, mesh, text: {"mesh": mesh})
    row = compiled.measured(None, "2x4", target, "auto")
    assert seen == [row["mesh"]]
    assert (row["mesh"].device, row["mesh"].shape) == (kind, (2, 4))


@pytest.mark.parametrize(("script", "arguments"), [("limits", ["memory", "--models", "mlp", "--target", "h100:2x4"])])
def test_limits_too(benchmark, monkeypatch, script, arguments):
    module = benchmark(script)
    seen = []
    monkeypatch.setattr(module, "limited", lambda name, mesh, *rest: seen.append(mesh.device))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    module.main()
    assert seen == ["h100:2x4"]
