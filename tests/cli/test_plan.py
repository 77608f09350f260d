"""The command line on real programs: a small network, captured and planned in this process."""

import gzip
import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from autoshard.api import Plan
from autoshard.cli.source import planned_with
from autoshard.mesh import Mesh
from autoshard.plans.value import TensorPlan
from autoshard.verify.check import VerifyReport
from tests.plans import made as plans

NETS = """
import torch

def mlp(width=64):
    model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
    return model, torch.zeros(16, width)

def step():
    model, x = mlp()
    return {"model": model, "inputs": (x, x), "loss_fn": torch.nn.functional.mse_loss,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}

def no_inputs():
    return {"model": mlp()[0], "inputs": ()}

def wrong_inputs():
    return mlp()[0], {"pixels": torch.zeros(16, 64)}

def wrong_shape():
    return mlp()[0], torch.zeros(16, 63)

class Branches(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum().item() > 0 else x - 1

def branches():
    return Branches(), torch.zeros(4, device="meta")
"""


@pytest.fixture(autouse=True)
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)


def test_a_training_step_is_planned_and_written(run, tmp_path):
    status, out, err = run("plan", "nets.py:step", "--mesh", "2x2", "--axes", "x,y", "-o", "plan.json", "--json")
    assert (status, err) == (0, "")
    plan = Plan.load(tmp_path / "plan.json")
    assert out.startswith(str(plan))
    assert (plan.program.kind, plan.mesh.axis_names) == ("train", ("x", "y"))
    assert set(plan.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    said = json.loads(out.splitlines()[-1])
    assert said["plan"] == "plan.json"
    assert said["predicted"]["step_time_s"] == plan.predicted.step_time_s
    assert said["solver"]["status"] == "optimal"
    assert {"source", "capture", "graph", "solve", "predict", "write"} <= set(said["stages"])
    assert said["seconds"] == pytest.approx(sum(stage["seconds"] for stage in said["stages"].values()), abs=0.02)


def test_the_same_call_twice_gives_the_same_bytes(run, tmp_path):
    for name in ("a.json", "b.json"):
        assert run("plan", "nets.py:step", "--mesh", "4", "--device", "h100", "-o", name)[0] == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_the_problem_behind_a_plan_can_be_solved_alone(run, tmp_path):
    command = ("plan", "nets.py:step", "--mesh", "2x2", "--memory", "1GB", "--dump-problem", "p.json.gz", "--json")
    status, out, _ = run(*command)
    assert status == 0
    planned = json.loads(out.splitlines()[-1])["solver"]
    about = json.loads(gzip.decompress((tmp_path / "p.json.gz").read_bytes()))["autoshard"]
    assert "0.weight" in about["names"]
    status, out, _ = run("solve", "p.json.gz", "--json")
    assert status == 0
    solved = json.loads(out.splitlines()[-1])
    assert solved["status"] == planned["status"] == "optimal"
    assert solved["objective"] / about["cost_scale"] == pytest.approx(planned["objective"], rel=1e-6)


def test_a_hint_is_kept(run, tmp_path):
    arguments = (
        "nets.py:mlp",
        "--set",
        "width=32",
        "--mesh",
        "2x2",
        "--hint",
        "0.weight=[model],[]",
        "-o",
        "plan.json",
    )
    assert run("plan", *arguments)[0] == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.parameters["0.weight"].spec == (("model",), ())
    assert plan.parameters["0.weight"].shape == (128, 32)
    assert plan.options.hints == {"0.weight": (("model",), ())}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nets.py:nothing"], "nets.py has no function 'nothing'"),
        (["missing.py:mlp"], "there is no file missing.py"),
        (["gpt2"], "'gpt2' names no program; write hf:MODEL_TYPE"),
        (["hf:gpt7"], "transformers has no model type 'gpt7'; did you mean"),
        (["hf:gpt2", "--set", "n_layers=2"], "gpt2's configuration has no field 'n_layers'; did you mean n_layer"),
        (["nets.py:no_inputs"], "no sample inputs were given"),
        (["nets.py:wrong_inputs"], "the sample inputs (pixels: "),
        (["nets.py:wrong_shape"], "63"),
        (["nets.py:branches"], "item"),
        (["nets.py:mlp", "--hint", "3.weight=[model],[]"], "3.weight"),
        (["nets.py:mlp", "--hint", "0.weight=[model]"], "0.weight has 2 dims, but the spec [model] has 1"),
        (["nets.py:mlp", "--hint", "0.weight=[rows],[]"], "no mesh axis is called 'rows'; the mesh has data, model"),
        (["nets.py:mlp", "--memory", "1kB"], "1,000 bytes per device"),
    ],
)
def test_bad_input_gets_one_line_and_status_2_and_writes_nothing(run, tmp_path, arguments, message):
    status, out, err = run("plan", *arguments, "--mesh", "2x2", "-o", "plan.json")
    assert (status, out) == (2, "")
    assert re.fullmatch(r"autoshard: [^\n]*\n", err)
    assert message in err
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_of_another_program_is_refused(run, tmp_path):
    assert run("plan", "nets.py:mlp", "--mesh", "2x2", "-o", "plan.json")[0] == 0
    status, out, err = run("verify", "plan.json", "nets.py:mlp", "--set", "width=32", "--target", "cpu")
    assert (status, out) == (2, "")
    assert err == "autoshard: this plan is for another program: parameter 2.bias is f32[32], the plan has f32[64]\n"


def test_what_a_plan_was_made_of_need_not_be_said_again(run, tmp_path):
    asked = ("--set", "width=48", "--dtype", "bf16", "--autocast")
    assert run("plan", "nets.py:mlp", *asked, "--mesh", "2x2", "-o", "plan.json")[0] == 0
    info = json.loads((tmp_path / "plan.json").read_text())["info"]
    assert info["source"] == {
        "source": "nets.py:mlp", "settings": {"width": "48"}, "dtype": "bf16", "autocast": True
    }  # fmt: skip
    _, out, err = run("verify", "plan.json", "nets.py:mlp", "--target", "cpu")
    assert err == ""
    assert "fidelity on cpu: " in out


# --- verify ------------------------------------------------------------------------------------------------------


def test_a_plan_is_held_against_what_is_compiled(run):
    assert run("plan", "nets.py:step", "--mesh", "2x2", "-o", "plan.json")[0] == 0
    status, out, err = run("verify", "plan.json", "nets.py:step", "--target", "cpu", "--json")
    said = json.loads(out.splitlines()[-1])
    assert err == ""
    assert (said["target"], said["max_fidelity"]) == ("cpu", 0.15)
    assert said["passed"] == (said["fidelity"] is not None and said["fidelity"] <= 0.15) == (status == 0)
    assert said["compiled_bytes"] == sum(row["compiled_bytes"] for row in said["collectives"])
    assert said["memory"]["compiled_bytes"] > 0
    assert "fidelity on cpu: " in out


@pytest.mark.parametrize(
    ("fidelity", "numbers", "wrong_sums", "status", "why"),
    [
        (0.15, None, (), 0, ""),
        (0.15, "equal", (), 0, ""),
        (0.15, "excused", (), 0, ""),
        (
            0.15,
            "not decided",
            (),
            3,
            "not decided: nothing was found wrong, but PyTorch on one device rounds as much as this (docs/verify.md)\n",
        ),
        (0.16, "equal", (), 1, "not verified: fidelity 16.0% is above the limit of 15.0%\n"),
        (float("inf"), None, (), 1, "not verified: collectives were predicted, but none are compiled\n"),
        (0.0, None, ("op 3",), 1, "not verified: XLA computes wrong sums under these annotations\n"),
        (0.0, "differ", (), 1, "not verified: the numbers under the plan are not those of one device\n"),
    ],
)
def test_the_exit_status_says_whether_the_plan_holds(
    run, tmp_path, monkeypatch, fidelity, numbers, wrong_sums, status, why
):
    plans.saved(tmp_path / "plan.json")
    ran = None if numbers is None else SimpleNamespace(status=numbers, equal=numbers in ("equal", "excused"))

    class Report:
        def __init__(self):
            self.fidelity, self.run, self.wrong_sums = SimpleNamespace(value=fidelity), ran, wrong_sums
            self.passes = partial(VerifyReport.passes, self)

        def as_dict(self):
            return {"fidelity": None}

        def __str__(self):
            return "the report"

    monkeypatch.setattr("autoshard.verify.check.verify_plan", lambda *_, **__: Report())
    found, out, err = run("verify", "plan.json", "nets.py:step")
    assert (found, out, err) == (status, f"the report\n{why}", "")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("abacus", "abacus"),
        ("tpu-v5e:2x2", "target tpu-v5e:2x2 has 4 devices, but the plan's mesh has 8"),
        ("tpu-v4:2x2x2", "has 16 devices (XLA counts two per tpu-v4 chip), but the plan's mesh has 8"),
        ("tpu-v5p:2x2x2:2slices", "has 16 devices"),
        ("h100:4", "has 4 devices"),
        ("h100:2x8", "has 16 devices"),
        ("h100:two", "h100:two"),
        ("h100:1x1x8", "hosts x GPUs per host"),
        ("a100:16", "nvlink joins at most 8 of a100-80gb"),
        ("tpu-v5e:8x1:1slice:2", "number of slices"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(run, tmp_path, target, message):
    plans.saved(tmp_path / "plan.json")  # for 8 devices
    status, out, err = run("verify", "plan.json", "nets.py:step", "--target", target)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"autoshard: [^\n]*\n", err)
    assert message in err


def test_cycles_of_what_is_no_tpu_are_refused(run, tmp_path):
    plans.saved(tmp_path / "plan.json")
    status, out, err = run("verify", "plan.json", "nets.py:step", "--target", "h100:8", "--cycles")
    assert (status, out) == (2, "")
    assert re.fullmatch(r"autoshard: only libtpu estimates cycles, and h100:8 is no TPU: choose [^\n]*\n", err)


def test_a_plan_that_does_not_lie_on_the_target_is_refused(run, tmp_path):
    found = plans.plan()
    mesh = Mesh((2, 4), ("data", "model"), "tpu-v5e", ("dcn", "ici"))
    replace(found, mesh=mesh).save(tmp_path / "plan.json")
    status, out, err = run("verify", "plan.json", "nets.py:step", "--target", "tpu-v5e:2x4")
    assert (status, out) == (2, "")
    assert "mesh 2x4 does not lie on tpu-v5e:2x4 (data of 2 on dcn, model of 4 on ici)" in err


@pytest.mark.parametrize(
    ("arguments", "mesh", "said"),
    [
        (
            ["--mesh", "2x4", "--device", "h100", "--placement", "ib,nvlink"],
            Mesh((2, 4), ("data", "model"), "h100", ("ib", "nvlink")),
            "2x4 (data=2 on ib, model=4 on nvlink) of h100",
        ),
        (
            ["--mesh", "2x4", "--device", "tpu-v5e:2x2:2slices"],
            Mesh((2, 4), ("data", "model"), "tpu-v5e:2x2:2slices"),
            "2x4 (data=2 on dcn, model=4 on ici) of tpu-v5e:2x2:2slices",
        ),
        (
            ["--mesh", "8", "--device", "h100:2x4"],
            Mesh((8,), ("data",), "h100:2x4"),
            "8 (data=8 on nvlink+ib) of h100:2x4",
        ),
    ],
)
def test_a_mesh_over_hosts_or_slices(run, tmp_path, arguments, mesh, said):
    status, out, _ = run("plan", "nets.py:step", *arguments, "-o", "plan.json")
    assert status == 0
    assert said in out
    assert Plan.load(tmp_path / "plan.json").mesh == mesh


def test_a_device_kind_with_a_topology_says_how_many_there_are(run, tmp_path):
    assert run("plan", "nets.py:mlp", "--device", "tpu-v5e:2x2", "-o", "plan.json")[0] == 0
    assert Plan.load(tmp_path / "plan.json").mesh.size == 4


def test_what_a_plan_was_planned_with():
    tokens = {"input_ids": TensorPlan((8, 512), "i64", ((), ()))}
    adamw = {"w.exp_avg": TensorPlan((2,), "f32", ((),))}
    plan = plans.plan()
    assert planned_with(replace(plan, inputs=tokens, optimizer_state=adamw)) == (8, 512, "adamw")
    assert planned_with(replace(plan, inputs=tokens)) == (8, 512, "sgd")
    assert planned_with(plan) == (8, None, "sgd")
    assert planned_with(plans.plan(plans.program(kind="forward"))) == (8, None, None)


def test_plans_are_compared(run, tmp_path):
    assert run("plan", "nets.py:step", "--mesh", "2x2", "-o", "mine.json")[0] == 0
    status, out, err = run("compare", "nets.py:step", "--mesh", "2x2", "--plans", "auto,dp,mine.json", "--json")
    assert (status, err) == (0, "")
    said = json.loads(out.splitlines()[-1])
    assert [each["name"] for each in said["plans"]] == ["auto", "dp", "mine.json"]
    auto, by_hand, mine = said["plans"]
    assert mine["predicted"] == auto["predicted"]
    assert auto["predicted"]["step_time_s"] <= by_hand["predicted"]["step_time_s"]
    assert out.startswith("On 2x2 (data=2, model=2) of cpu")
    assert said["stages"]["plans by hand"]["seconds"] >= 0


def test_plans_of_other_steps_are_compared(run):
    step = ("--micro-batches", "2", "--clip-grad-norm", "1.0", "--remat", "full")
    status, out, err = run("compare", "nets.py:step", "--mesh", "2x2", "--plans", "dp", *step, "--json")
    assert (status, err) == (0, "")
    ((_, twice),) = [(each["name"], each["predicted"]) for each in json.loads(out.splitlines()[-1])["plans"]]
    _, out, _ = run("compare", "nets.py:step", "--mesh", "2x2", "--plans", "dp", "--json")
    ((_, once),) = [(each["name"], each["predicted"]) for each in json.loads(out.splitlines()[-1])["plans"]]
    assert twice["collectives"][0]["bytes"] == 2 * once["collectives"][0]["bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "2x2", "--plans", "auto,zero"), "no plan is called 'zero'"),
        (("--mesh", "2x2", "--plans", ","), "--plans names none"),
        (("--mesh", "2x2", "--plans", "dp,gone.json"), "cannot read gone.json"),
        (("--mesh", "2x2", "--target", "h100:8"), "target h100:8 has 8 devices"),
        (("--mesh", "2x2", "--plot", "figure.txt"), "a figure is written as png, svg, pdf"),
        (("--plans", "dp"), "Missing option '--mesh'"),
    ],
)
def test_a_comparison_that_cannot_be_made(run, arguments, message):
    status, out, err = run("compare", "nets.py:step", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_page_is_written(run, tmp_path):
    assert run("plan", "nets.py:step", "--mesh", "2x2", "-o", "plan.json")[0] == 0
    status, out, err = run("show", "plan.json", "--html", "plan.html", "--json")
    assert (status, err) == (0, "")
    assert out.startswith("Wrote plan.html\n")
    assert json.loads(out.splitlines()[-1])["html"] == "plan.html"
    assert (tmp_path / "plan.html").read_text() == Plan.load(tmp_path / "plan.json").to_html()


def test_other_shardings_are_explained(run, tmp_path):
    assert run("plan", "nets.py:step", "--mesh", "2x2", "-o", "plan.json")[0] == 0
    status, out, err = run("explain", "plan.json", "nets.py:step", "0.weight", "0", "--html", "why.html", "--json")
    assert (status, err) == (0, "")
    weight, activation = json.loads(out.splitlines()[-1])["explained"]
    assert (weight["tensor"], weight["shape"], activation["tensor"]) == ("0.weight", [256, 64], "0")
    assert out.startswith("0.weight f32[256,64], * as planned")
    assert "Why this" in (tmp_path / "why.html").read_text()
    status, out, err = run("explain", "plan.json", "nets.py:step", "1.weight")
    assert (status, out) == (2, "")
    assert "no tensor called '1.weight'; did you mean" in err


def test_hints_can_be_left_out_and_shapes_left_open(run, tmp_path):
    hinted = ("plan", "nets.py:mlp", "--mesh", "2x2", "--hint", "0.weight=[model],[data]", "--json")
    kept = json.loads(run(*hinted, "-o", "kept.json")[1].splitlines()[-1])
    free = json.loads(run(*hinted, "--keep", "none", "-o", "free.json")[1].splitlines()[-1])
    assert Plan.load(tmp_path / "kept.json").options.hints == {"0.weight": (("model",), ("data",))}
    assert Plan.load(tmp_path / "free.json").options.hints == {}
    assert free["predicted"]["step_time_s"] <= kept["predicted"]["step_time_s"]
    status, out, err = run("plan", "nets.py:mlp", "--devices", "4", "-o", "open.json")
    assert (status, err) == (0, "")
    assert "Mesh shapes tried: 2, * as planned" in out
    assert [each.shape for each in Plan.load(tmp_path / "open.json").search] == [(4,), (2, 2)]
