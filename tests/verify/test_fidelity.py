import json
import math

import pytest

from autoshard.cost.machine.collectives import Collective, seconds
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import load_device
from autoshard.mesh import AxisPart, Mesh
from autoshard.verify.compiled_collective import CompiledCollective
from autoshard.verify.fidelity import fidelity
from autoshard.verify.judge import judged
from autoshard.verify.schedule import collective_seconds, roofline
from autoshard.verify.work import CompiledWork, Kernel

MODEL, DATA, BOTH = ("model",), ("data",), ("data", "model")


def test_kinds_and_axes_that_differ_count_on_both_sides():
    predicted = [
        Collective("all-reduce", MODEL, 100, 3),
        Collective("all-gather", DATA, 50),
        Collective("all-to-all", DATA, 7, 0),
    ]
    compiled = [
        CompiledCollective("all-reduce", MODEL, 200),
        CompiledCollective("all-reduce", MODEL, 50, 2),
        CompiledCollective("all-reduce", BOTH, 100),
    ]
    found = fidelity(predicted, compiled, target="cpu")
    assert [(row.kind, row.axes, row.predicted_bytes, row.compiled_bytes) for row in found.rows] == [
        ("all-gather", DATA, 50, 0),
        ("all-reduce", BOTH, 0, 100),
        ("all-reduce", MODEL, 300, 300),
    ]
    assert found.value == pytest.approx((50 + 100) / 400)
    assert (found.predicted_bytes, found.compiled_bytes) == (350, 400)
    assert [row.compiled_count for row in found.rows] == [0, 1, 3]


def test_errors_of_different_ops_do_not_cancel():
    predicted = [Collective("all-reduce", MODEL, 100, op=1), Collective("all-reduce", MODEL, 60, op=2)]
    compiled = [
        CompiledCollective("all-reduce", MODEL, 70, aten=1),
        CompiledCollective("all-reduce", MODEL, 90, aten=2),
    ]
    assert fidelity(predicted, compiled, aten_of=lambda op: op).value == pytest.approx((30 + 30) / 160)
    assert fidelity(predicted, compiled).value == 0.0  # without ops, nothing tells them apart


def test_one_transfer_of_an_op_may_be_compiled_in_pieces_and_another_ops_may_not():
    predicted = [Collective("all-reduce", MODEL, 100, op=1), Collective("all-reduce", MODEL, 7, op=3)]
    pieces = [
        CompiledCollective("all-reduce", MODEL, 25, 4, aten=1),
        CompiledCollective("all-reduce", MODEL, 7, aten=3),
    ]
    assert fidelity(predicted, pieces, aten_of=lambda op: op).value == 0.0
    elsewhere = [CompiledCollective("all-reduce", MODEL, 25, 4, aten=2), pieces[1]]
    assert fidelity(predicted, elsewhere, aten_of=lambda op: op).value == pytest.approx(200 / 107)


def test_equal_transfers_of_several_ops_may_be_joined_and_no_others():
    predicted = [Collective("all-gather", MODEL, 50, op=op) for op in (1, 2, 3)]
    predicted.append(Collective("all-gather", MODEL, 40, op=4))
    joined = [CompiledCollective("all-gather", MODEL, 100, aten=9), CompiledCollective("all-gather", MODEL, 90, aten=8)]
    found = fidelity(predicted, joined, aten_of=lambda op: op)
    assert found.value == pytest.approx((50 + 40 + 90) / 190)


def test_a_label_that_moved_and_one_that_is_missing_are_no_error():
    predicted = [Collective("all-gather", MODEL, 100, op=1), Collective("all-gather", MODEL, 60, op=2)]
    moved = [CompiledCollective("all-gather", MODEL, 60, aten=5), CompiledCollective("all-gather", MODEL, 100, aten=2)]
    assert fidelity(predicted, moved, aten_of=lambda op: op).value == 0.0
    nameless = [CompiledCollective("all-gather", MODEL, 80, 2)]
    assert fidelity(predicted, nameless, aten_of=lambda op: op).value == 0.0
    too_few = [CompiledCollective("all-gather", MODEL, 50, 2), CompiledCollective("all-gather", MODEL, 5, aten=2)]
    assert fidelity(predicted, too_few, aten_of=lambda op: op).value == pytest.approx((160 - 105) / 105)


def test_nothing_against_nothing_is_exact_and_something_against_nothing_is_not():
    assert fidelity([], []).value == 0.0
    wrong = fidelity([Collective("all-reduce", MODEL, 8)], [])
    assert wrong.value == math.inf
    assert wrong.as_dict()["fidelity"] is None
    assert "none compiled" in wrong.table()
    json.dumps(wrong.as_dict(), allow_nan=False)


def test_the_ops_that_differ_most_come_first():
    predicted = [Collective("all-reduce", MODEL, 1000, op=4), Collective("all-gather", DATA, 10, op=5)]
    compiled = [
        CompiledCollective("all-reduce", MODEL, 1000, aten=40),
        CompiledCollective("all-gather", DATA, 9_000_000, aten=50),
        CompiledCollective("all-to-all", DATA, 20_000, 2, parts=((None, 15_000), (60, 5_000))),
        CompiledCollective("all-reduce", DATA, 8, aten=70),
    ]
    names = {50: ("aten.mm.default", "h.0.mlp")}
    found = fidelity(predicted, compiled, target="h100:8", aten_of=lambda op: op * 10, names=names)
    assert [(culprit.aten, culprit.difference) for culprit in found.culprits] == [
        (50, 8_999_990),
        (None, 30_000),
        (60, 10_000),
    ]
    text = str(found)
    assert (
        "op 50 aten.mm.default in h.0.mlp: predicted all-gather data 0.000010 MB; compiled all-gather data 9.00" in text
    )
    assert "ops without a label: predicted none; compiled all-to-all data 0.03 MB" in text
    assert "fidelity on h100:8: 100.0% of the compiled bytes differ" in text
    listed = found.as_dict()["differences"][0]
    assert listed["compiled"] == [{"kind": "all-gather", "axes": ["data"], "bytes": 9_000_000}]


def test_the_table_lines_up():
    text = fidelity([Collective("all-reduce", BOTH, 5_000_000)], []).table()
    header, row, *_ = text.splitlines()
    assert row.index("5.00") + len("5.00") == header.index("predicted MB") + len("predicted MB")
    assert row.startswith("all-reduce  data+model")


def test_judged_is_collectives_and_kernels_one_after_the_other():
    mesh, device = Mesh((2, 4), ("data", "model"), "tpu-v5e"), load_device("tpu-v5e")
    kernels = (
        Kernel("dot", {"bf16": 4e12}, 1e6, count=2),
        Kernel("add", {}, 8e9),
        Kernel("copy", {}, 8e9, launches=0),
    )
    collective = CompiledCollective("all-gather", MODEL, 1 << 20, 3)
    found = judged([collective], CompiledWork(kernels), mesh, device, 5)
    dot = roofline_seconds(4e12, 1e6, "bf16", device)
    add = roofline_seconds(0, 8e9, "f32", device)
    assert found.compute_s == pytest.approx(2 * dot + add + add - device.kernel_overhead)
    assert found.communication_s == pytest.approx(3 * seconds("all-gather", MODEL, 1 << 20, mesh, device))
    assert found.step_time_s == found.compute_s + found.communication_s
    assert (found.flops, found.collective_bytes, found.memory_bytes) == (8e12, 3 << 20, 5)
    assert roofline(kernels[0], device) == pytest.approx(dot)


def test_parts_of_axes_and_rare_kinds_cost_as_what_they_resemble():
    mesh, device = Mesh((2, 4), ("data", "model"), "h100"), load_device("h100")
    part = CompiledCollective("all-reduce", (AxisPart(("model",), 2, 4),), 1 << 20)
    assert collective_seconds(part, mesh, device) == seconds("all-reduce", MODEL, 1 << 20, mesh, device)
    mixed = CompiledCollective("ragged-all-to-all", (AxisPart(("data", "model"), 2),), 1 << 20)
    assert collective_seconds(mixed, mesh, device) == seconds("all-to-all", BOTH, 1 << 20, mesh, device)
