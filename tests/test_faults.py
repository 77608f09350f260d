"""Faults of the world: damaged files, full disks, processes that are killed. One line each, the right exit status, and
nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autoshard import files, kept
from autoshard.errors import FileError
from autoshard.show.terminal import printable
from tests.frontends.test_stablehlo_file import FORWARD
from tests.plans.made import plan, saved

ROOT = Path(__file__).resolve().parents[1]


def refused(ran, said):
    """Bad input: exit status 2, and one line that says it."""
    status, out, err = ran
    assert (status, out) == (2, "")
    assert re.fullmatch(r"autoshard: [^\n]*\n", err)
    assert said in err
    return err


# --- plans and problems ------------------------------------------------------------------------------------------


LONG = "1" + "0" * 400


def changed(path, value):
    """A plan's dict with the field at `path` replaced; `value` is JSON, as it is."""
    document = json.loads(plan().to_json())
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = "@here"
    return json.dumps(document).replace('"@here"', value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("predicted", "peak_memory_bytes"), LONG, "predicted.peak_memory_bytes: 10000"),
        (("predicted", "step_time_s"), LONG, "predicted.step_time_s: "),
        (("predicted", "mfu"), "1e400", "predicted.mfu: Infinity is greater than the maximum"),
        (("solver", "objective"), "-1e400", "solver.objective: -Infinity is less than the minimum"),
        (("solver", "bound"), "NaN", "NaN is not a JSON number"),
        (("inputs", "x", "shape", 0), "9223372036854775808", "inputs.x.shape[0]: 9223372036854775808 is greater"),
        (("options", "seed"), "7" * 5000, "thousands of digits"),
        (("inputs", "x", "shape"), "[" * 900 + "]" * 900, "inputs.x.shape[0]: expected integer, found [["),
        (("inputs", "x", "shape"), "[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_numbers_and_nesting_that_a_plan_cannot_have(run, path, value, said):
    Path("plan.json").write_text(changed(path, value))
    refused(run("show", "plan.json"), said)


def test_a_plan_of_nothing_but_errors_is_refused_as_fast_as_it_is_read(run):
    """In three times what reading the JSON takes; measured in CPU seconds, the best of three each."""
    Path("plan.json").write_text(changed(("activations",), "[" + ",".join(["{}"] * 1_000_000) + "]"))

    def seconds(function):
        taken = []
        for _ in range(3):
            start = time.process_time()
            function()
            taken.append(time.process_time() - start)
        return min(taken)

    reading = seconds(lambda: json.loads(Path("plan.json").read_bytes()))
    assert seconds(lambda: refused(run("show", "plan.json"), "activations[")) < 3 * reading + 0.1


def problem(**changes):
    nodes = {"intervals": [[0, 1], [0, 1]], "costs": [[1, 2], [3, 4]], "usages": [[1, 1], [1, 1]]} | changes
    return json.dumps({"problem": {"nodes": nodes, "usage_limit": 9}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (problem().replace("[1, 2]", "[" + LONG + ", 2]"), "problem.nodes.costs[0] has a number beyond"),
        (problem().replace("[1, 2]", "[1e400, 2]"), "problem.nodes.costs[0] has a number beyond"),
        (problem().replace("[1, 2]", "[NaN, 2]"), "NaN is not a JSON number"),
        (problem().replace("[1, 2]", '["NaN", "1"]'), "problem.nodes.costs[0] must be a list"),
        (problem().replace("[1, 2]", "[null, 2]"), "problem.nodes.costs[0] has"),
        (problem().replace(": 9", ": 1e400"), "problem.usage_limit must be null or a number"),
        (problem(intervals=[[0, 10**30], [0, 1]]), "problem.nodes.intervals[0] must be [start, end]"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", 'no object "problem"'),
    ],
)
def test_problems_with_numbers_that_are_none(run, text, said):
    Path("problem.json").write_text(text)
    refused(run("solve", "problem.json"), said)


def test_a_damaged_gzip_file_is_bad_input(run):
    import gzip

    content = bytearray(gzip.compress(problem().encode()))
    content[len(content) // 2] ^= 0xFF
    Path("problem.json.gz").write_bytes(content)
    refused(run("solve", "problem.json.gz"), "not JSON in gzip")


def test_a_problem_without_nodes_is_solved(run):
    Path("problem.json").write_text('{"problem": {"nodes": {"intervals": [], "costs": [], "usages": []}}}')
    status, out, _ = run("solve", "problem.json", "-o", "solution.json")
    assert (status, json.loads(Path("solution.json").read_text())) == (0, [])
    assert "objective 0" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("solve", "problem.json", "--time-limit", "nan"),
        ("solve", "problem.json", "--seed", "-1"),
        ("plan", "net.mlir", "--mesh", "2x2", "--time-limit", "nan"),
        ("plan", "net.mlir", "--mesh", "2x2", "--memory", "nan"),
        ("verify", "plan.json", "net.mlir", "--max-fidelity", "nan"),
    ],
)
def test_limits_that_are_no_numbers(run, arguments):
    refused(run(*arguments), "nan" if "nan" in arguments else "-1")


# --- modules -----------------------------------------------------------------------------------------------------

CALLS = """func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @FIRST(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @f(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @SECOND(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @declared(%a: tensor<4xf32>) -> tensor<4xf32>
"""


def doubling(levels):
    """Functions each of which calls the next twice."""
    text = ["func.func @main() { call @f0() : () -> ()\n return }"]
    for i in range(levels):
        text.append(
            f"func.func private @f{i}() {{ call @f{i + 1}() : () -> ()\n call @f{i + 1}() : () -> ()\n return }}"
        )
    return "\n".join([*text, f"func.func private @f{levels}() {{ return }}"])


HUGE = "func.func @main(%a: tensor<9223372036854775807x4xf32>) { return }"
ALIASES = "\n".join(["!t0 = tuple<i1>", *(f"!t{i} = tuple<!t{i - 1}, !t{i - 1}>" for i in range(1, 40))])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("func.func private @main(%a: tensor<4xf32>) -> tensor<4xf32>", "the function main has no body"),
        (CALLS.replace("FIRST", "main").replace("SECOND", "f"), "the function main calls itself"),
        (CALLS.replace("FIRST", "f").replace("SECOND", "main"), "calls itself, at once or through another"),
        (CALLS.replace("FIRST", "f").replace("SECOND", "f"), "the function f calls itself"),
        (CALLS.replace("FIRST", "f").replace("SECOND", "declared"), "the function declared has no body"),
        (doubling(60), "ops when all that it calls is inlined"),
        (HUGE, "more elements than XLA can count"),
        ("module {\n" * 20_000 + FORWARD + "}" * 20_000, "nested more deeply"),
        (FORWARD.replace("tensor<f32>", "tuple<" * 20_000 + "tensor<f32>" + ">" * 20_000), "nested more deeply"),
        (ALIASES + FORWARD.replace("tensor<f32>", "!t39"), "refer to one another"),
        (FORWARD.replace("%x: tensor<8x16xf32>", '%x: tensor<8x16xf32> {a = "\\FF"}'), "it is not UTF-8"),
        (FORWARD.replace("twice", "tw\xcdce").encode("latin1"), "it is not UTF-8"),
        (b"\0" * 100, "neither an MLIR module nor"),
        (b"ML\xefR\x0dStableHLO_v1.0.0\0" + b"\xff" * 40, "StableHLO artifact that this jaxlib cannot read"),
        (b"ML\xefR" + b"\xff" * 40, "is no StableHLO module"),
    ],
)  # fmt: skip
def test_modules_on_which_mlir_or_an_inliner_would_end(run, text, said):
    Path("net.mlir").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(run("plan", "net.mlir", "--mesh", "2x2", "-o", "plan.json"), said)
    assert not Path("plan.json").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, "3", '{"input_locations": 3}', '{"input_locations": [3]}'])
def test_a_damaged_file_beside_a_module(run, content):
    Path("net.bytecode").write_text(FORWARD)
    Path("net.meta").write_text(content)
    refused(run("plan", "net.bytecode", "--mesh", "2x2"), "net.meta is not the JSON")


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "1" + "0" * 400, "1e-320", "nan", "inf", "1979-13-01"])
def test_numbers_and_nesting_that_a_device_cannot_have(run, value):
    Path("net.mlir").write_text(FORWARD)
    Path("kind.toml").write_text(f'[kind]\ntarget = "cpu"\nflops = {{f32 = {value}}}\n')
    refused(run("plan", "net.mlir", "--mesh", "2", "--device", "kind.toml"), "kind.toml")


# --- terminals ---------------------------------------------------------------------------------------------------


def test_names_cannot_steer_a_terminal(run):
    evil = "\x1b[31mw\x07\u202e\x9b\ud800"
    document = json.loads(plan().to_json())
    document["inputs"] = {evil: document["inputs"]["x"]}
    document["mesh"]["device"] = evil
    Path("plan.json").write_text(json.dumps(document))
    status, out, _ = run("show", "plan.json", "--json")
    assert status == 0
    assert r"\x1b[31mw\x07\u202e\x9b\ud800" in out
    assert json.loads(out.splitlines()[-1])["mesh"]["device"] == evil
    assert printable(out) == out
    err = refused(run("show", f"{evil[:8]}.json"), r"\x1b[31mw")
    assert printable(err) == err


# --- disks -------------------------------------------------------------------------------------------------------


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT, **options
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
@pytest.mark.parametrize("arguments", [("show", "PLAN"), ("show", "PLAN", "--json"), ("--help",)])
def test_a_full_disk_on_standard_output(tmp_path, arguments):
    saved(tmp_path / "plan.json")
    with open("/dev/full", "w") as full:
        done = command(*(each.replace("PLAN", str(tmp_path / "plan.json")) for each in arguments), stdout=full)
    assert done.returncode == 2
    assert re.fullmatch(r"autoshard: [^\n]*standard output: No space left on device\n", done.stderr)


def test_a_closed_standard_output(tmp_path):
    saved(tmp_path / "plan.json")
    done = command("show", str(tmp_path / "plan.json"), preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_empty_variable_is_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOSHARD_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_dir() == tmp_path / "autoshard"


def test_without_a_home_folder_there_is_no_cache(monkeypatch):
    import pwd

    def nobody(_):
        raise KeyError("getpwuid(): uid not found: 1000")

    for name in ("AUTOSHARD_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(FileError, match=r"no home folder.*set AUTOSHARD_CACHE"):
        files.cache_dir()


def test_a_user_without_a_name_is_given_one(monkeypatch):
    import getpass
    import pwd

    def nobody(_):
        raise KeyError("getpwuid(): uid not found: 1000")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")  # empty counts as unset; what was there is put back
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    files.name_user()
    assert getpass.getuser() == f"uid{os.getuid()}"


@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: b"", lambda c: c[65:], lambda c: c.replace(b"a", b"b")])
def test_what_is_kept_is_read_as_written_or_not_at_all(tmp_path, spoil):
    path = tmp_path / "folder" / "entry"
    assert kept.read(path) is None
    kept.write(path, b"a\n\0a")
    assert kept.read(path) == b"a\n\0a"
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    path.write_bytes(spoil(path.read_bytes()))
    for each in (path, other):
        with pytest.raises(kept.DamagedError):
            kept.read(each)


# --- processes that are killed -----------------------------------------------------------------------------------

WRITES = """
import os, sys, time
from pathlib import Path
from autoshard import files
with files.work_folder(Path(sys.argv[1]), "work-") as folder, files._beside(Path(sys.argv[1]) / "plan.json"):
    (folder / "file").write_text("")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    writing = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert writing.stdout.readline() == "ready\n"
        before = set(tmp_path.iterdir())
        assert len(before) == 2
        files.write(tmp_path / "other.json", "{}")
        with files.work_folder(tmp_path, "work-"):
            pass
        assert set(tmp_path.iterdir()) == before | {tmp_path / "other.json"}
    finally:
        writing.kill()
        writing.wait()
    assert set(tmp_path.iterdir()) == before | {tmp_path / "other.json"}
    files.write(tmp_path / "another.json", "{}")
    with files.work_folder(tmp_path, "work-"):
        pass
    assert set(tmp_path.iterdir()) == {tmp_path / "other.json", tmp_path / "another.json"}


def test_a_work_folder_that_another_process_removed_at_once_is_made_again(tmp_path, monkeypatch):
    """Two workers compiled for the first time at once: one took the other's new folder for a left-over."""
    made, mkdtemp = [], tempfile.mkdtemp

    def removed_once(**given):
        made.append(Path(mkdtemp(**given)))
        if len(made) == 1:
            files._remove_if_left(made[0])
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", removed_once)
    with files.work_folder(tmp_path, "work-") as folder:
        assert folder == made[1]
        assert folder.is_dir()


def test_another_programs_files_are_left_alone(tmp_path):
    (tmp_path / ".download.part").write_text("")
    (tmp_path / "x.autoshard.part").write_text("")
    files.write(tmp_path / "plan.json", "{}")
    assert len(list(tmp_path.iterdir())) == 3


SLOW = """
import sys, time
from pathlib import Path
from autoshard import cli, workers
from autoshard.solver import iopddl

def read(path):
    code = "from autoshard.workers import end_with_parent; end_with_parent(); import time; time.sleep(600)"
    with workers.started([sys.executable, "-c", code], {}) as process:
        print(process.pid, flush=True)
        process.wait()

iopddl.read = read
cli.main(["solve", "problem.json"])
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_ends_its_workers(how):
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore it
    code = f"{heard}\n{SLOW}"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    worker = int(running.stdout.readline())
    running.send_signal(how)
    assert running.wait(60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
