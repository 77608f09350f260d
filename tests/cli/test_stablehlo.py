"""The command line on StableHLO files: planned, lowered, held against the compiler."""

import json
import re

import pytest

from tests.frontends.test_stablehlo_file import FORWARD


@pytest.fixture(autouse=True)
def net(tmp_path):
    (tmp_path / "net.mlir").write_text(FORWARD)


def test_a_file_is_planned_lowered_and_planned_again(run, tmp_path):
    assert run("plan", "net.mlir", "--mesh", "2x2", "--hint", "arg1=[],[model]", "-o", "plan.json")[0] == 0
    status, out, _ = run("lower", "plan.json", "net.mlir", "-o", "annotated.mlir", "--form", "shardy", "--json")
    assert status == 0
    assert json.loads(out.splitlines()[-1])["form"] == "shardy"
    assert '{sdy.sharding = #sdy.sharding<@mesh, [{}, {"model"}]>}' in (tmp_path / "annotated.mlir").read_text()
    assert run("lower", "plan.json", "annotated.mlir", "-o", "again.mlirbc")[0] == 0
    assert (tmp_path / "again.mlirbc").read_bytes()[:4] == b"ML\xefR"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "net.mlir", "--mesh", "2", "--train", "sgd"), "net.mlir is a whole program already: --train is for"),
        (("plan", "gone.mlir", "--mesh", "2"), "cannot read gone.mlir"),
        (
            ("plan", "net.mlir", "--mesh", "2", "--hint", "w=[data],[]"),
            "no parameter, buffer, input or optimizer state",
        ),
        (("lower", "gone.json", "net.mlir", "-o", "out.mlir"), "gone.json"),
        (("lower", "plan.json", "other.mlir", "-o", "out.mlir"), "this plan is for another program"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run, tmp_path, arguments, message):
    run("plan", "net.mlir", "--mesh", "2", "-o", "plan.json")
    (tmp_path / "other.mlir").write_text(re.sub("stablehlo.add", "stablehlo.multiply", FORWARD))
    status, _, err = run(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "out.mlir").exists()
