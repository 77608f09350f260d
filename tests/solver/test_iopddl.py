import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver import iopddl
from autoshard.solver.objective import evaluate
from autoshard.solver.problem import Problem, Status
from autoshard.solver.solve import solve
from tests.solver.random_problems import best_by_enumeration, examples, random_problem

SHARED = Path(__file__).parents[3] / "shared" / "iopddl"
EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {"intervals": [[0, 3], [1, 2]], "costs": [[1, 5], [2, 0]], "usages": [[4, 2], [3, 1]]},
        "edges": {"nodes": [[0, 1]], "costs": [[0, 9, 0, 10**18]]},
        "usage_limit": 6,
    }
}


def test_reads_the_format(tmp_path):
    path = tmp_path / "example.json.gz"
    path.write_bytes(gzip.compress(json.dumps(EXAMPLE).encode()))
    problem = iopddl.read(path)
    assert problem.edges == [(0, 1)]
    assert problem.edge_costs[0].tolist() == [[0.0, 9.0], [0.0, np.inf]]
    assert problem.limit == 6.0
    # (0, 0) would use 7 at time 1, (1, 1) is forbidden: 7 by (1, 0) is left beside 10 by (0, 1).
    solution = solve(problem)
    assert (solution.choice, solution.objective, solution.status) == ((1, 0), 7.0, Status.OPTIMAL)


@examples(60)
@given(st.integers(0, 2**32 - 1))
def test_a_written_problem_has_the_same_optimum(tmp_path_factory, seed):
    problem = random_problem(seed)
    path = tmp_path_factory.mktemp("iopddl") / "p.json"
    scale = iopddl.write(problem, path)
    back = iopddl.read(path)
    solution = solve(back)
    best = best_by_enumeration(problem)
    assert solution.objective / scale == pytest.approx(best, rel=1e-9, abs=1e-12)
    if solution.choice:
        first = evaluate(problem, solution.choice[: len(problem.node_costs)])
        assert first.feasible
        assert first.objective == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_the_same_problem_gives_the_same_bytes(tmp_path):
    one, two = tmp_path / "one.json.gz", tmp_path / "two.json.gz"
    iopddl.write(random_problem(5), one)
    iopddl.write(random_problem(5), two)
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p.pop("nodes"), "problem.nodes must have the lists"),
        (lambda p: p["nodes"]["costs"].append([1]), "equally long"),
        (lambda p: p["nodes"]["usages"].__setitem__(1, [1]), r"usages\[1\] has 1 entries, costs\[1\] has 2"),
        (lambda p: p["nodes"]["intervals"].__setitem__(0, [1]), r"intervals\[0\] must be \[start, end\]"),
        (
            lambda p: p["edges"]["nodes"].__setitem__(0, [0, 7]),
            r"edges.nodes\[0\] must be two indices of nodes below 2",
        ),
        (lambda p: p["edges"]["costs"].__setitem__(0, [1, 2]), r"edges.costs\[0\] has 2 entries, expected 2 \* 2"),
        (lambda p: p["nodes"]["costs"].__setitem__(0, ["x"]), r"nodes.costs\[0\] must be a list of numbers"),
    ],
)
def test_malformed_documents_are_refused_with_the_place(change, text):
    document = json.loads(json.dumps(EXAMPLE))
    change(document["problem"])
    with pytest.raises(iopddl.FormatError, match=text):
        iopddl.from_json(document)


def test_a_file_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(iopddl.FormatError, match=r"x\.json: not JSON"):
        iopddl.read(path)


def test_agrees_with_the_contest_evaluator():
    path = SHARED / "asplos-2025-iopddl-G.json.gz"
    if not path.exists():
        pytest.skip("the public IOPDDL instances are not in ../shared/iopddl")
    spec = importlib.util.spec_from_file_location("iopddl_evaluate", SHARED / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    contest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contest)
    problem = iopddl.read(path)
    assert isinstance(problem, Problem)
    theirs = contest.read_problem(str(path))
    choice = [int(np.argmin(c)) for c in problem.node_costs]
    result, expected = evaluate(problem, choice), contest.evaluate(theirs, choice)
    assert result.peak == expected["peak"]
    assert expected["infinite"] or result.objective == expected["cost"]


def test_instance_g_is_solved_to_its_known_optimum():
    path = SHARED / "asplos-2025-iopddl-G.json.gz"
    if not path.exists():
        pytest.skip("the public IOPDDL instances are not in ../shared/iopddl")
    solution = solve(iopddl.read(path), time_limit=120)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == 217039.0
