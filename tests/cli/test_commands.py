import json
import os
import re
import subprocess
import sys

import pytest

from autoshard.cli import commands as cli
from autoshard.cli.options import parse_hint, parse_setting
from autoshard.quantities import parse_bytes
from tests.plans import made as plans


def test_the_command_line_imports_nothing_heavy():
    heavy = "torch torch_xla jax numpy networkx ortools numba transformers jsonschema rich"
    code = f"import sys, autoshard.cli; print([m for m in '{heavy}'.split() if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "[]\n"


def test_no_command_says_what_there_is(run):
    status, out, _ = run()
    assert status == 0
    assert "Commands:" in out
    assert "plan" in out


def test_the_version(run):
    assert run("--version") == (0, "autoshard, version 0.1.0\n", "")


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GB", 16 * 10**9), ("16GiB", 16 * 2**30), ("1.5e9", 1_500_000_000), ("80 gb", 80 * 10**9), ("2048", 2048),
        ("0.5TB", 5 * 10**11), ("12kB", 12_000), ("3MiB", 3 * 2**20),
    ],
)  # fmt: skip
def test_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "16 parsecs", "1e", "nan", "16GBs", "16Gb/s"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(ValueError, match=r"bytes are written 16GB \(10\^9\), 16GiB \(2\^30\) or 1\.5e9, not"):
        parse_bytes(text)


def test_hints_and_settings():
    assert parse_hint("transformer.wte.weight=[model],[]") == ("transformer.wte.weight", (("model",), ()))
    assert parse_hint("x=[data+model]") == ("x", (("data", "model"),))
    assert parse_setting("n_layer=2") == ("n_layer", "2")
    assert parse_setting("name=a=b") == ("name", "a=b")


# --- bad input ---------------------------------------------------------------------------------------------------

MESH = ("--mesh", "2x4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["plan"], "Missing argument 'SOURCE'"),
        (["plan", "hf:gpt2", "--bogus"], "No such option '--bogus'"),
        (["plan", "hf:gpt2"], "no mesh: pass --mesh 2x4, or --devices 8 to have every shape tried"),
        (["plan", "hf:gpt2", "--axes", "a,b", "--devices", "8"], "--axes names the axes of --mesh: give both"),
        (["plan", "hf:gpt2", *MESH, "--devices", "8"], "give --mesh or --devices, not both"),
        (["plan", "hf:gpt2", "--mesh", "2*4"], "a mesh shape is numbers joined by x, such as 2x4, not '2*4'"),
        (["plan", "hf:gpt2", "--mesh", "0x4"], "every axis of a mesh needs at least one device"),
        (["plan", "hf:gpt2", *MESH, "--axes", "x,x"], "mesh axis names must differ: x is used more than once"),
        (["plan", "hf:gpt2", *MESH, "--axes", "x"], "mesh shape (2, 4) has 2 axes but 1 names: x"),
        (["plan", "hf:gpt2", *MESH, "--device", "abacus"], "no device kind is called 'abacus'; known are a100-40gb"),
        (["plan", "hf:gpt2", *MESH, "--device", "tpu-v5e:8"], "tpu-v5e needs its topology, chips per torus dim such"),
        (["plan", "hf:gpt2", *MESH, "--device", "tpu-v5e:4x4"], "mesh 2x4 has 8 devices, tpu-v5e:4x4 has 16"),
        (["plan", "hf:gpt2", *MESH, "--device", "tpu-v4:2x4"], "tpu-v4:2x4x1 has 16 (XLA counts 2 per chip)"),
        (["plan", "hf:gpt2", *MESH, "--device", "tpu-v5e:2x2x2"], "tpu-v5e is a torus of 2 dims"),
        (["plan", "hf:gpt2", *MESH, "--device", "tpu-v6e:2x2:two"], "or the number of slices such as 2slices"),
        (["plan", "hf:gpt2", *MESH, "--device", "h100:1x16"], "nvlink joins at most 8 of h100, not 16: such as 2x8"),
        (["plan", "hf:gpt2", *MESH, "--device", "cpu:8"], "a device of kind cpu has no topology"),
        (["plan", "hf:gpt2", *MESH, "--device", "h100:2x8", "--devices", "8"], "give --mesh or --devices, not both"),
        (["plan", "hf:gpt2", "--device", "h100:2x8", "--devices", "8"], "mesh 8 has 8 devices, h100:2x8 has 16"),
        (
            ["plan", "hf:gpt2", "--placement", "ib", "--devices", "8"],
            "--placement places the axes of --mesh: give both",
        ),
        (["plan", "hf:gpt2", *MESH, "--placement", "ib"], "placement names a link per axis: 2 axes, 1 links"),
        (
            ["plan", "hf:gpt2", *MESH, "--device", "h100", "--placement", "dcn,ici"],
            "device h100 has no link 'dcn'; it has nvlink, ib",
        ),
        (
            ["plan", "hf:gpt2", "--mesh", "4x4", "--device", "h100", "--placement", "nvlink,nvlink"],
            "nvlink joins 8 devices",
        ),
        (
            ["plan", "hf:gpt2", "--mesh", "2x8", "--device", "h100:2x8", "--placement", "nvlink,ib"],
            "that puts 2 devices on nvlink, which joins 8 there",
        ),
        (["plan", "hf:gpt2", *MESH, "--memory", "lots"], "bytes are written 16GB (10^9), 16GiB (2^30) or 1.5e9"),
        (["plan", "hf:gpt2", *MESH, "--hint", "wte"], "a hint is written name=[axes],[axes], one pair of brackets"),
        (["plan", "hf:gpt2", *MESH, "--hint", "wte=model"], "a spec is one bracketed axis list per dim"),
        (["plan", "hf:gpt2", *MESH, "--hint", "w=[data]", "--hint", "w=[]"], "the hint for w is given twice, and diff"),
        (["plan", "hf:gpt2", *MESH, "--set", "n_layer"], "--set wants key=value, such as n_layer=2, not 'n_layer'"),
        (["plan", "hf:gpt2", *MESH, "--train", "rmsprop"], "'rmsprop' is not one of 'adamw', 'sgd'"),
        (["plan", "hf:gpt2", *MESH, "--batch", "0"], "Invalid value for '--batch': 0 is not in the range x>=1"),
        (["plan", "hf:gpt2", *MESH, "--time-limit", "-1"], "Invalid value for '--time-limit'"),
        (["plan", "hf:gpt2", *MESH, "-o", "no/plan.json"], "cannot write no/plan.json: No such file or directory"),
        (["show", "missing.json"], "cannot read missing.json: No such file or directory"),
    ],
)
def test_bad_input_gets_one_line_and_status_2_and_writes_nothing(run, tmp_path, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"autoshard: [^\n]*\n", err)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_malformed_plan_is_refused_in_one_line(run, tmp_path):
    value = json.loads(plans.plan().to_json())
    value["parameters"]["h.0.weight"]["spec"] = [["model"], "model"]
    (tmp_path / "bad.json").write_text(json.dumps(value))
    assert run("show", "bad.json") == (
        2, "", 'autoshard: bad.json: parameters.h.0.weight.spec[1]: expected array, found "model"\n',
    )  # fmt: skip


def test_a_message_of_several_lines_becomes_one(run, monkeypatch):
    def refuse(path):
        raise ValueError("first\n   second\n")

    monkeypatch.setattr(cli.Plan, "load", refuse)
    assert run("show", "plan.json") == (2, "", "autoshard: first second\n")


def test_a_missing_extra_is_named(run, monkeypatch):
    def refuse(path):
        raise ModuleNotFoundError("No module named 'torch_xla'", name="torch_xla.core")

    monkeypatch.setattr(cli.Plan, "load", refuse)
    assert run("show", "plan.json") == (2, "", "autoshard: torch_xla is not installed: pip install 'autoshard[xla]'\n")


def test_a_bug_is_no_bad_input(run, monkeypatch):
    def fail(path):
        raise IndexError("off by one")

    monkeypatch.setattr(cli.Plan, "load", fail)
    status, out, err = run("show", "plan.json")
    assert (status, out) == (70, "")
    assert "IndexError: off by one" in err
    assert err.endswith("autoshard: this is a bug of autoshard's; please report it with the lines above\n")


# --- show --------------------------------------------------------------------------------------------------------


def test_jax_takes_no_accelerator(run, monkeypatch):
    """It would lock a TPU, and says on standard error what it finds."""
    monkeypatch.delenv("JAX_PLATFORMS")
    run("plan", "hf:no_such_model", "--mesh", "8")
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_show_prints_the_plan(run, tmp_path):
    plan = plans.saved(tmp_path / "plan.json")
    assert run("show", "plan.json") == (0, f"{plan}\n", "")


def test_show_ends_in_one_line_of_json(run, tmp_path):
    plans.saved(tmp_path / "plan.json", replicated=plans.REPLICATED)
    status, out, _ = run("show", "plan.json", "--json")
    said = json.loads(out.splitlines()[-1])
    assert status == 0
    assert said["plan"] == "plan.json"
    assert said["predicted"]["step_time_s"] == 0.0123
    assert said["solver"] == {"status": "optimal", "objective": 0.0123, "bound": 0.0123, "gap": 0.0, "backend": "highs"}
    assert said["replicated_ops"] == 7
    assert said["replicated_cost_s"] == pytest.approx(8e-6)
