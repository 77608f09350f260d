"""`plan(..., confirm="auto")` of programs that fit as predicted, and not as libtpu or XLA's GPU compiler have it."""

import json
import re
from functools import cache

import pytest

import autoshard
from autoshard.mesh import Mesh
from autoshard.plans.value import NoPlanError
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compile_annotated
from autoshard.verify.compile import compile_module  # noqa: F401  marks these tests as ones that compile
from autoshard.verify.targets import TargetError, default_target, parse_target

torch = pytest.importorskip("torch")


def mesh_on(target):
    try:
        parse_target(target).packages()
    except TargetError as error:
        pytest.skip(str(error))
    return Mesh((2, 4), device=target)


def compiled_bytes(program, plan):
    """Peak per device of a plan as compiled for its own devices, whatever the plan says of it."""
    graph = build_graph(program)
    module = annotate(program, graph, plan.annotations(graph), plan.mesh)
    target = parse_target(default_target(plan.mesh), plan.mesh.size)
    return compile_annotated(graph, plan.mesh, target, module).memory.peak


@cache
def made(rows):
    """A training step in bf16, of which less memory is predicted than is compiled."""
    layers = torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    network = torch.nn.Sequential(*layers, *(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)))
    batch = torch.zeros(rows, 256, dtype=torch.bfloat16)
    return autoshard.capture(
        network.to(torch.bfloat16),
        (batch, batch),
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    )


@pytest.fixture(scope="module")
def step():
    return made(512)


@pytest.mark.parametrize(("target", "rows", "limit"), [("tpu-v5e:2x4", 512, 2_130_000), ("h100:8", 2048, 7_600_000)])
def test_a_plan_that_does_not_fit_as_compiled_is_not_returned(target, rows, limit):
    step, compiles = made(rows), 2
    mesh = mesh_on(target)
    predicted = autoshard.plan_program(step, mesh, memory=limit)
    assert predicted.predicted.peak_memory_bytes <= limit < compiled_bytes(step, predicted)
    plan = autoshard.plan_program(step, mesh, memory=limit, confirm="auto")
    said = plan.confirmed
    assert (said.verdict, said.compiles) == ("fits", compiles)
    assert compiled_bytes(step, plan) == said.compiled_bytes <= limit
    assert plan.options.memory == limit
    assert autoshard.Plan.from_json(plan.to_json()).confirmed == said
    assert f"per device: fits ({said.compiler} for {said.target}, {compiles} plans compiled in " in str(plan)


def test_a_refined_plan_is_confirmed_for_its_target(step):
    plan = autoshard.plan_program(step, Mesh((2, 2)), refine="cpu", confirm="always")
    compiled = {each.name: each.peak_memory_bytes for each in plan.refined.candidates}
    assert (plan.confirmed.verdict, plan.confirmed.target) == ("fits", "cpu")
    assert plan.confirmed.compiled_bytes == compiled[plan.refined.chosen]


class Exp(torch.nn.Module):
    def forward(self, x):
        return torch.exp(x)


def test_where_no_plan_fits_as_compiled_the_error_says_so():
    mesh = mesh_on("tpu-v5e:2x4")
    program = autoshard.capture(Exp(), torch.zeros(40_000, 1024, 1024, device="meta"))
    said = r"no plan was found that fits the device as compiled: the least of 1 that libtpu [\d.]+ compiled takes 41,9"
    with pytest.raises(NoPlanError, match=said):
        autoshard.plan_program(program, mesh, memory=None, confirm="always")


def test_a_plan_that_libtpu_refuses_for_its_memory_does_not_fit():
    """A table of 18 GB, replicated, is within a limit that v5e does not have."""
    mesh = mesh_on("tpu-v5e:2x4")
    with torch.device("meta"):
        program = autoshard.capture(torch.nn.Embedding(1_100_000, 4096), torch.zeros(64, 16, dtype=torch.long))
    assert autoshard.plan_program(program, mesh, memory=20e9).predicted.peak_memory_bytes > 18e9
    plan = autoshard.plan_program(program, mesh, memory=20e9, confirm="auto")
    assert plan.parameters["weight"].spec != ((), ())
    assert (plan.confirmed.verdict, plan.confirmed.compiles) == ("fits", 2)
    assert plan.confirmed.compiled_bytes < 10e9


def test_the_command_line_confirms_near_the_limit(run, tmp_path):
    mesh_on("tpu-v5e:2x4")
    (tmp_path / "net.py").write_text(
        "import torch\ndef table(): return torch.nn.Embedding(1024, 256), torch.zeros(64, 16, dtype=torch.long)"
    )
    ask = ("plan", "net.py:table", "--mesh", "2x4", "--device", "tpu-v5e", "--json", "-o", "plan.json")
    status, out, _ = run(*ask)
    said = json.loads(out.splitlines()[-1])
    assert (status, said["confirmed"]) == (0, None)
    ask = (*ask, "--memory", str(said["predicted"]["peak_memory_bytes"] * 11 // 10))
    status, out, _ = run(*ask)
    said = json.loads(out.splitlines()[-1])
    assert (status, said["confirmed"]["verdict"], said["confirmed"]["compiles"]) == (0, "fits", 1)
    assert "confirm" in said["stages"]
    report, planned = out.split("\nPlanned in ")
    assert re.match(r"[\d.]+ s, and [\d.]+ s of compiling\n", planned)
    assert run("show", "plan.json")[1] == report
    info = json.loads((tmp_path / "plan.json").read_text())["info"]
    assert info.pop("hidden", 0.9) == 0.9
    assert info.pop("bars")["level"] == "measured steps"
    assert info == {"confirmed": said["confirmed"], "source": {"source": "net.py:table"}}
    _, out, _ = run(*ask, "--confirm", "never")
    assert json.loads(out.splitlines()[-1])["confirmed"] is None
