"""The benchmarks: plans are made for the machine that they are compiled for."""

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a script of `benchmarks/`, which stand beside one another."""
    pytest.importorskip("tabulate")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield __import__
    for name in [name for name, module in sys.modules.items() if _of_benchmarks(module)]:
        del sys.modules[name]


def _of_benchmarks(module):
    return Path(getattr(module, "__file__", None) or "/").parent == ROOT / "benchmarks"


@pytest.mark.parametrize(("target", "kind"), [("h100:2x4", "h100:2x4"), ("tpu-v5e:4x2", "tpu-v5e:4x2"), ("cpu", "cpu")])
def test_plans_are_made_for_the_topology_that_they_are_compiled_for(benchmark, monkeypatch, target, kind):
    compiled = benchmark("compiled")
    seen = []
    monkeypatch.setattr(compiled, "annotations", lambda name, graph, mesh: seen.append(mesh))
    monkeypatch.setattr(compiled, "measured_plan", lambda graph, chosen, mesh, *rest: {"mesh": mesh})
    row = compiled.measured(None, "2x4", target, "auto")
    assert seen == [row["mesh"]]
    assert (row["mesh"].device, row["mesh"].shape) == (kind, (2, 4))


def test_limits_too_and_a_row_that_is_there_is_kept(benchmark, monkeypatch, tmp_path):
    limits, results = benchmark("limits"), benchmark("results")
    seen = []

    def made(graph, mesh, target):
        seen.append((graph, mesh.device))
        return {"unlimited": {"predicted_s": 0.25}, "tight": {"left_out": "none", "limit": 8.0, "gap": 0.5}}

    monkeypatch.setattr(limits, "graph_of", lambda name: name)
    monkeypatch.setitem(limits.MADE, "tight", made)
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", f"limits tight --models mlp --targets h100:2x4 --out {out}".split())
    limits.main()
    limits.main()
    assert seen == [("mlp", "h100:2x4")]
    first, second = results.read(out)
    assert (first["plan"], first["predicted_s"], "limit" in first) == ("unlimited", 0.25, False)
    assert (second["plan"], second["limit"], second["gap"]) == ("tight", 8.0, 0.5)


def test_pages_say_what_the_rows_say(benchmark):
    tables = benchmark("tables")
    used = {name for page in tables.PAGES for _, name, _ in tables.MARKED.findall(page.read_text())}
    assert used == {*tables.BLOCKS}
    for page in tables.PAGES:
        assert tables.written(page.read_text()) == page.read_text(), f"make tables changes {page.name}"


ROW = {"left_out", "error", "fidelity", "predicted_s", "objective_s"}


def test_rows_say_what_made_them(benchmark):
    results = benchmark("results")
    for path in results.RESULTS.glob("*.csv"):
        rules = path.name == "ablation.csv"  # a row is about a rule, not a plan
        own = rules or path.name in ("real.csv", "remat.csv")  # columns of its own
        found = list(csv.DictReader(path.open(newline=""))) if own else results.read(path)
        assert found
        for row in found:
            assert {"verdict"} & {*row} if rules else ROW & {*row}, row
            assert all(row[name] for name in ("sources", "commit", "date", "versions")), row


def test_one_program_that_is_compiled_twice_counts_once(benchmark):
    tables = benchmark("tables")
    row = dict.fromkeys(tables.FIGURES, 1.0) | {"model": "mlp", "target": "h100:8", "plan": "dp"}
    twice = [row, row | {"target": "h100:2x4", "compiled_s": 2.0}, row | {"plan": "auto"}]
    assert tables.distinct(twice) == 1
    assert tables.distinct([*twice, row | {"compiled_memory": 2.0}, row | {"target": "cpu"}]) == 3


def test_the_worst_kind_is_judged_by_itself_if_it_is_large(benchmark):
    worst_kind = benchmark("tables").worst_kind
    row = {"compiled_bytes": 1000.0, "collectives": "all-gather a 90 100 10; all-gather b 20 10 10; all-reduce a 2 1 1"}
    assert worst_kind(row) == 0.0  # the gathers' sum is right, and one byte is no kind
    assert worst_kind(row | {"compiled_bytes": 50.0}) == 1.0


def test_rows_are_read_as_they_were_written_and_the_last_of_a_key_counts(benchmark, tmp_path):
    results = benchmark("results")
    row = {"model": "a, b", "target": "cpu", "mesh": "2x4", "plan": "dp", "fidelity": 0.25, "commit": "1e5"}
    results.add(tmp_path / "rows.csv", row)
    results.add(tmp_path / "rows.csv", row | {"fidelity": float("inf")})
    results.add(tmp_path / "rows.csv", row | {"plan": "fsdp", "left_out": "no form"})
    first, second = results.read(tmp_path / "rows.csv")
    assert (first["model"], first["fidelity"], first["commit"]) == ("a, b", float("inf"), "1e5")
    assert (second["left_out"], results.current(first)) == ("no form", True)
    others = first | {"sources": "others"}
    assert not results.current(others)
    assert results.kept(others, again=False)
    assert not results.kept(others, again=True)


def test_rows_that_were_made_without_cycles_stay_beside_those_with(benchmark, tmp_path):
    results = benchmark("results")
    path = tmp_path / "rows.csv"
    row = {"model": "mlp", "target": "tpu-v5e:2x4", "mesh": "2x4", "plan": "dp", "compiled_s": 0.25}
    results.add(path, row)
    head, line = path.read_text().splitlines()
    path.write_text(f"{head.removesuffix(',compiler_s')}\n{line.removesuffix(',')}\n")  # as before there were any
    results.add(path, row | {"plan": "fsdp", "compiler_s": 0.125})
    without, timed = results.read(path)
    assert ("compiler_s" in without, timed["compiler_s"], timed["plan"]) == (False, 0.125, "fsdp")
    assert not results.timed(without)
    assert results.timed(timed)
    assert results.timed(without | {"target": "h100:8"})


SMALL = {"name": "Small-1m", "layers": 6, "d_model": 128, "d_ff": 512, "heads": 4, "kv_heads": 2, "vocab": 512}
STEP = {
    "id": "small",
    "model": {**SMALL, "seq": 64, "mlp": "swiglu", "tied_embeddings": False},
    "hardware": "H100-SXM-80GB",
    "devices": 16,
    "mesh": {"dp": 1, "fsdp": 16, "tp": 1, "pp": 1, "cp": 1, "ep": 1},
    "global_batch_sequences": 32,
    "global_batch_tokens": 2048,
    "microbatch": 1,
    "dtype": "bf16",
    "remat": "full per block",
    "tags": ["pytorch"],
    "measured": {"step_time_s": 0.1},
}


def test_a_published_step_is_predicted_under_the_plan_that_it_describes(benchmark):
    published = benchmark("published")
    mesh, plan = published.place(STEP)
    assert (mesh.shape, mesh.device, plan) == ((16,), "h100:2x8", "fsdp")
    line = published.predicted(STEP)
    assert 0 < line["predicted_s"] <= line["serial_s"]
    assert line["ratio"] == line["predicted_s"] / 0.1
    kept = published.predicted({**STEP, "remat": "none"})
    assert kept["serial_s"] < line["serial_s"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"remat": "selective (per-op SAC)"},
        {"model": {**STEP["model"], "name": "Megatron-1B", "kv_heads": SMALL["heads"]}},
    ],
)
def test_a_step_under_pytorch_takes_longer_than_xlas(benchmark, changes):
    published = benchmark("published")
    row = {**STEP, **changes}
    eager, compiled = (published.predicted({**row, "tags": [tag]})["serial_s"] for tag in ("pytorch", "jax"))
    assert compiled < eager


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"remat": "host offload"}, "activations offloaded to the host"),
        ({"remat": "odd"}, "recomputation 'odd'"),
        ({"mesh": {**STEP["mesh"], "pp": 2}}, "pipeline parallelism"),
        ({"hardware": "Abacus"}, "no device kind for Abacus"),
        ({"dtype": "fp8"}, "dtype fp8"),
    ],
)
def test_a_published_step_that_cannot_be_built_says_why(benchmark, changes, why):
    line = benchmark("published").predicted({**STEP, **changes})
    assert line["why"] == why
    assert "ratio" not in line


def test_slices_and_tensors_of_a_published_step(benchmark):
    place = benchmark("published").place
    slices = {**STEP, "hardware": "TPU v5e", "devices": 512, "mesh": {**STEP["mesh"], "dp": 2, "fsdp": 256}}
    assert place(slices)[0].device == "tpu-v5e:16x16:2slices"
    assert place(slices)[1] == "hsdp"
    assert place({**STEP, "mesh": {**STEP["mesh"], "fsdp": 8, "tp": 2}})[1] == "torchtitan"
    assert place({**STEP, "mesh": {**STEP["mesh"], "dp": 16, "fsdp": 1}})[1] == "dp"
