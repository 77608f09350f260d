"""The fuzzer finds nothing, and finds what there is."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUZZ = [sys.executable, str(ROOT / "benchmarks" / "fuzz.py")]


def test_a_few_damaged_files_of_each_kind(tmp_path):
    command = [*FUZZ, "plans", "problems", "modules", "devices", "-n", "6", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0 failed") == 4


def test_a_case_is_written_and_run_again(tmp_path):
    """With a command line that fails, the case is told, and is the same each time."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any(each.endswith('fuzz.py') for each in sys.orig_argv):\n"
        "    from autoshard.cli import commands as cli\n"
        "    def main(arguments): raise ZeroDivisionError('a bug')\n"
        "    cli.main = main\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    written = []
    for folder in ("one", "two"):
        command = [*FUZZ, "plans", "--case", "4", "-o", folder]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, timeout=600
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "case 4: exit 70: ZeroDivisionError: a bug" in done.stdout
        written.append({each.name: each.read_bytes() for each in (tmp_path / folder).iterdir()})
    assert written[0] == written[1]
    assert {"plan.json", "step.mlir", "command"} == set(written[0])
