"""`autoshard solve`: IOPDDL in, one strategy index per node out."""

from __future__ import annotations

import gzip
import json

import pytest

from autoshard.cli.commands import main

PROBLEM = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 2], [1, 3]],
            "costs": [[1, 3], [2, 0]],
            "usages": [[8, 4], [8, 2]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[0, 5, 0, 0]]},
        "usage_limit": 12,
    }
}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_best_choice_within_the_limit_is_written(tmp_path, capsys, suffix: str):
    problem, solution = tmp_path / f"problem{suffix}", tmp_path / "solution.json"
    text = json.dumps(PROBLEM).encode()
    problem.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    assert run("solve", problem, "-o", solution, "--json") == 0
    # Without the limit (0, 0) and (1, 1) both cost 3; (0, 0) uses 16 of 12.
    assert json.loads(solution.read_text()) == [1, 1]
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["status"], said["objective"], said["bound"], said["gap"]) == ("optimal", 3.0, 3.0, 0.0)


def test_a_problem_without_a_solution_says_the_least_that_is_possible(tmp_path, capsys):
    problem, solution = tmp_path / "problem.json", tmp_path / "solution.json"
    tight = json.loads(json.dumps(PROBLEM))
    tight["problem"]["usage_limit"] = 5
    problem.write_text(json.dumps(tight))
    assert run("solve", problem, "-o", solution, "--json") == 1
    out = capsys.readouterr().out.splitlines()
    assert "the least possible peak is 6" in out[0]
    assert json.loads(out[-1])["objective"] is None
    assert not solution.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), ("{", "not JSON"), ("{}", 'no object "problem"'), ('{"problem": {}}', "problem.nodes")],
)
def test_what_is_no_problem_is_refused_in_one_line(tmp_path, capsys, content: str | None, said: str):
    problem = tmp_path / "problem.json"
    if content is not None:
        problem.write_text(content)
    assert run("solve", problem) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
