"""Plans as they were decided: each golden program is planned anew and held against its file (`make golden`)."""

import json

import pytest

from autoshard.plans.value import SolverInfo
from tests.golden import record
from tests.golden.programs import GOLDEN
from tests.plans import made as plans

SHOWN = 40
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def locked():
    """Other versions capture other ops and plan otherwise."""
    if outside := record.outside_the_lock():
        pytest.skip(f"golden plans are those of the locked environment: {outside}")
    pytest.importorskip("torch_xla")


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_plan_is_decided_again(name, locked):
    found = record.differences(record.read(name), record.record(GOLDEN[name].plan()))
    if found:
        lines = [*found[:SHOWN], *[f"and {len(found) - SHOWN} more"] * (len(found) > SHOWN)]
        pytest.fail("\n  ".join([f"{name}: {len(found)} differences", *lines]), pytrace=False)


def test_every_file_is_of_a_program():
    files = {file.name.removesuffix(".json.gz") for file in record.FOLDER.glob("*.json.gz")}
    assert files == set(GOLDEN)


@pytest.mark.parametrize("name", [name for name, golden in GOLDEN.items() if golden.unlimited])
def test_a_memory_limit_binds(name):
    limit = GOLDEN[name].options["memory"]
    limited, unlimited = (record.read(each) for each in (name, GOLDEN[name].unlimited))
    assert limited["program"]["fingerprint"] == unlimited["program"]["fingerprint"]
    assert limited["predicted"]["peak_memory_bytes"] <= limit < unlimited["predicted"]["peak_memory_bytes"]


def test_what_differs_is_named():
    old, new = (json.loads(plans.plan(replicated=plans.REPLICATED).to_json()) for _ in range(2))
    assert record.differences(old, new) == []
    new["parameters"]["h.1.weight"]["spec"] = [[], ["data", "model"]]
    new["activations"][1]["copies"] = []
    new["activations"][2]["spec"] = [["data"], ["model"]]
    del new["replicated_ops"][6]
    new["predicted"]["step_time_s"] *= 1 + 2e-6
    new["predicted"]["compute_s"] *= 1 + 5e-7
    new["predicted"]["peak_memory_bytes"] += 1
    assert record.differences(old, new) == [
        "parameters h.1.weight spec: [model],[] → [],[data,model]",
        "activations op1.0 aten.tanh.default (h.0) copies copy for op2: consumer 2, spec [data],[] → absent",
        "activations op2.0 aten.mm.default (h.1) spec: [data],[] → [data],[model]",
        "predicted step_time_s: 0.0123 → 0.0123000246",
        "predicted peak_memory_bytes: 3200000000 → 3200000001",
        "replicated_ops 6: op sort, module h.5, reason no rule, cost_s 1e-06 → absent",
    ]
    tensors = dict(reversed(old["parameters"].items()))
    assert record.differences(old, old | {"parameters": tensors}) == [
        "parameters: h.0.weight, h.1.weight → h.1.weight, h.0.weight"
    ]


def test_a_plan_that_is_not_proved_optimal_is_none():
    with pytest.raises(AssertionError, match="time_limit"):
        record.record(plans.plan(solver=SolverInfo("time_limit", 1.0, 0.9, 0.1, "search")))
