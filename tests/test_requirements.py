"""The locks hold what `pyproject.toml` asks for, and nothing that differs by machine."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+( ; .+)?")
LOCKS = {"xla": ["dev"], "core": ["torchax", "hf", "test"]}


def _wanted(extras: list[str]) -> list[Requirement]:
    """What `autoshard[extras]` depends on, its own extras followed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, left, seen = [Requirement(each) for each in project["dependencies"]], list(extras), set()
    while left:
        extra = left.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for each in map(Requirement, project["optional-dependencies"][extra]):
            if canonicalize_name(each.name) == "autoshard":
                left += each.extras
            else:
                wanted.append(each)
    return wanted


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_names_versions_and_markers_only(lock):
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    assert lines
    assert [line for line in lines if not LINE.fullmatch(line)] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_satisfies_pyproject(lock):
    locked: dict[str, list[Requirement]] = {}
    for line in (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines():
        each = Requirement(line)
        locked.setdefault(canonicalize_name(each.name), []).append(each)
    for wanted in _wanted(LOCKS[lock]):
        found = locked.get(canonicalize_name(wanted.name))
        assert found, f"{wanted.name} is not locked: run `make lock`"
        for each in found:
            (version,) = (specifier.version for specifier in each.specifier)
            assert wanted.specifier.contains(version), f"{each} is outside {wanted}: run `make lock`"
