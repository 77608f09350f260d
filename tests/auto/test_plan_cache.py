"""Plans kept on disk: found again, planned once by several processes, planned anew where an entry is broken."""

import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import api, files, kept
from autoshard.auto.plan_cache import cached_plan, key
from autoshard.errors import FileError
from autoshard.frontends.stablehlo_file import read_program
from autoshard.mesh import Mesh
from tests.frontends.test_stablehlo_file import FORWARD

MESH = Mesh((2, 2))
HINTS = {"arg1": "[],[model]"}


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.mlir").write_text(FORWARD)
    return read_program(tmp_path / "net.mlir")


@pytest.fixture
def planned(monkeypatch):
    """Counts how often something is planned."""
    calls = []
    plan_program = api.plan_program

    def counted(*arguments, **options):
        calls.append(options)
        return plan_program(*arguments, **options)

    monkeypatch.setattr("autoshard.auto.plan_cache.plan_program", counted)
    return calls


def entries(tmp_path):
    return sorted((tmp_path / "cache" / "plans").glob("*.json"))


def test_a_plan_is_made_once(program, planned, tmp_path):
    first = cached_plan(program, MESH, hints=HINTS)
    assert cached_plan(program, MESH, hints=HINTS) == first
    assert len(planned) == 1
    assert len(entries(tmp_path)) == 1


def test_an_entry_that_cannot_be_written_is_warned_of(program, monkeypatch, tmp_path):
    def full(path, content):
        raise FileError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(files, "write", full)
    with pytest.warns(UserWarning, match="this plan is not kept: .*No space left"):
        assert cached_plan(program, MESH, hints=HINTS).parameters is not None
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "other",
    [{"mesh": Mesh((4, 1))}, {"mesh": Mesh((2, 2), device="h100")}, {"hints": None}, {"memory": 1e6}, {"seed": 1}],
)
def test_another_question_has_another_key(program, other):
    options = {"hints": HINTS, **other}
    mesh = options.pop("mesh", MESH)
    assert key(program, mesh, options) != key(program, MESH, {"hints": HINTS})


def test_another_program_has_another_key(program, tmp_path):
    (tmp_path / "other.mlir").write_text(FORWARD.replace("stablehlo.add", "stablehlo.subtract"))
    assert key(read_program(tmp_path / "other.mlir"), MESH, {}) != key(program, MESH, {})


@pytest.mark.parametrize(
    "broken", [lambda text: text[:-100], lambda text: text.replace("model", "madel"), lambda _: ""]
)
def test_a_broken_entry_is_planned_anew_with_a_warning(program, planned, tmp_path, broken):
    first = cached_plan(program, MESH, hints=HINTS)
    (entry,) = entries(tmp_path)
    entry.write_text(broken(entry.read_text()))
    with pytest.warns(UserWarning, match="cannot be used .*planning anew"):
        assert cached_plan(program, MESH, hints=HINTS) == first
    assert len(planned) == 2
    assert cached_plan(program, MESH, hints=HINTS) == first
    assert len(planned) == 2


def test_an_entry_that_is_no_plan_is_planned_anew(program, planned, tmp_path):
    first = cached_plan(program, MESH)
    (entry,) = entries(tmp_path)
    kept.write(entry, b"{}")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert cached_plan(program, MESH) == first


@pytest.mark.parametrize("how", ["copied", "written"])
def test_an_entry_for_another_mesh_is_not_taken(program, planned, tmp_path, how):
    cached_plan(program, Mesh((4, 1)))
    (other,) = entries(tmp_path)
    mine = other.with_name(f"{key(program, MESH, {})}.json")
    if how == "copied":
        mine.write_bytes(other.read_bytes())
    else:
        kept.write(mine, kept.read(other))
    with pytest.warns(UserWarning, match="cannot be used"):
        assert cached_plan(program, MESH).mesh == MESH
    assert len(planned) == 2


def test_without_a_home_folder_plans_are_not_kept(program, monkeypatch):
    def nobody(_):
        raise KeyError("getpwuid(): uid not found: 1000")

    for name in ("AUTOSHARD_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.warns(UserWarning, match="plans are not kept: there is no home folder"):
        assert cached_plan(program, MESH).mesh == MESH


def test_a_cache_that_cannot_be_written_is_no_error(program, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="plans are not kept"):
        assert cached_plan(program, MESH).mesh == MESH


CHILD = """
import sys
from autoshard.auto import plan_cache
from autoshard.frontends.stablehlo_file import read_program
from autoshard.mesh import Mesh

made = plan_cache.plan_program
def counted(*arguments, **options):
    print("planned")
    return made(*arguments, **options)
plan_cache.plan_program = counted
print(plan_cache.cached_plan(read_program(sys.argv[1]), Mesh((2, 2))).to_json().count("spec"))
"""


def test_of_several_processes_that_start_at_once_one_plans(program, tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "net.mlir")]
    root = Path(__file__).resolve().parents[2]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(8)]
    said = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert sum("planned" in words for words in said) == 1
    assert len({words[-1] for words in said}) == 1
