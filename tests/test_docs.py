"""What README and the tutorial show is what happens: their files, commands and programs, run in their order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
OTHERWISE_SHOWN = "autoshard compare"
"""A command whose output is not in the text."""


def blocks():
    """(language, text) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)


def run(command, directory):
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.stem)
def test_files_and_names_that_are_pointed_to_exist(page):
    for path, name in re.findall(
        r"`((?:tests|benchmarks|examples|autoshard|notebooks)/[\w/.]+)(?:::(\w+))?`", page.read_text()
    ):
        assert (ROOT / path).exists(), path
        assert not name or re.search(rf"^(?:(?:def|class) )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), name


def test_readme_shows_what_happens(tmp_path):
    pytest.importorskip("torch_xla")
    pytest.importorskip("libtpu")
    [block, *_] = re.findall(r"^```\n(\$ autoshard plan hf:.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    for line in block.splitlines():
        if line.startswith("$ "):
            printed = run([sys.executable, "-m", *shlex.split(line[2:], comments=True)], tmp_path).splitlines()
        elif line.strip() != "...":
            assert line.rstrip() in [each.rstrip() for each in printed]


def test_the_tutorial_shows_what_happens(tmp_path):
    pytest.importorskip("torch_xla")
    pytest.importorskip("jax_plugins.xla_cuda12")
    python = [text for language, text in blocks() if language == "python"]
    plain = [text for language, text in blocks() if not language]
    (tmp_path / "step.py").write_text(python[0])
    shown = 0
    for command, output in zip(plain, [*plain[1:], ""], strict=True):
        if not command.startswith("autoshard ") or command.startswith(OTHERWISE_SHOWN):
            continue
        assert len(command.splitlines()) == 1
        printed = run([sys.executable, "-m", *command.split()], tmp_path).splitlines()
        for line in output.splitlines():
            if line.strip() != "...":
                assert line.rstrip() in [each.rstrip() for each in printed], "\n".join([line, "is not among", *printed])
                shown += 1
    assert shown > 30
    (tmp_path / "train.py").write_text(python[1])
    losses = [float(line) for line in run([sys.executable, "train.py"], tmp_path).split()]
    assert len(losses) == 3
