"""A plan by aten op: what is pinned, and where copies are read."""

import dataclasses

import pytest

from autoshard.lower.torch_xla.schedule import Schedule
from autoshard.mesh import Mesh
from autoshard.plans.value import (
    ActivationKey,
    ActivationPlan,
    Copy,
    OpSignature,
    Options,
    Plan,
    PlanError,
    ProgramInfo,
    TensorPlan,
)

MESH = Mesh((2, 4), ("data", "model"))
ROWS, COLUMNS = (("data",), ()), ((), ("model",))


def plan(activations=(), weight_copies=(), ops=None):
    ops = ops or (
        OpSignature("aten.mm.default", ("f32[8,8]",), ("x", "w")),
        OpSignature("aten.view_copy.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("aten.gt.Scalar", ("i1[8,8]",), ((1, 0),)),
        OpSignature("aten.add.Tensor", ("f32[8,8]",), ((1, 0), "w")),
        OpSignature("aten.mul.Tensor", ("f32[8,8]",), ((0, 0), (3, 0))),
    )
    info = ProgramInfo("f", "forward", "torch_xla", {}, (), tuple(ops))
    weight = TensorPlan((8, 8), "f32", ROWS, tuple(weight_copies))
    return Plan(
        info, MESH, Options(), {"w": weight}, {}, {"x": TensorPlan((8, 8), "f32", ROWS)}, {}, {}, tuple(activations)
    )


def value(index, name, spec, *copies, dtype="f32"):
    return ActivationPlan(ActivationKey("torch_xla", index, name, 0), "", (8, 8), dtype, spec, copies)


def test_pins_and_arguments():
    found = Schedule.of(plan([value(0, "aten.mm.default", COLUMNS)]))
    assert found.pins == {(0, 0): COLUMNS}
    assert found.arguments["w"].spec == ROWS
    assert found.inputs == {"x"}


def test_bool_values_are_never_pinned():
    assert not Schedule.of(plan([value(2, "aten.gt.Scalar", ROWS, dtype="i1")])).pins


def test_a_copy_is_read_where_the_consumer_reads_the_value_and_let_go_after_its_last_reader():
    copies = [Copy(0, COLUMNS), Copy(3, COLUMNS)]
    found = Schedule.of(plan(weight_copies=copies))
    shared = ("w", (COLUMNS,))
    assert found.reads == {0: {1: shared}, 3: {1: shared}}
    assert found.last_read == {shared: 3}


def test_copies_with_different_specs_are_different_copies():
    found = Schedule.of(plan(weight_copies=[Copy(0, COLUMNS), Copy(3, ((), ()))]))
    assert found.last_read == {("w", (COLUMNS,)): 0, ("w", (((), ()),)): 3}


def test_hops_are_kept_as_long_as_a_copy_made_from_them_is_read():
    both = (("data",), ("model",))
    found = Schedule.of(plan(weight_copies=[Copy(0, COLUMNS, (both,)), Copy(3, ((), ()), (both,))]))
    assert found.last_read == {("w", (both,)): 3, ("w", (both, COLUMNS)): 0, ("w", (both, ((), ()))): 3}


def test_a_copy_is_read_through_a_view_that_passes_the_value_on():
    found = Schedule.of(plan([value(0, "aten.mm.default", None, Copy(3, COLUMNS))]))
    assert found.reads == {3: {0: ((0, 0), (COLUMNS,))}}


def test_a_copy_is_read_through_an_op_that_copies_the_value_over_another():
    ops = (
        OpSignature("aten.mm.default", ("f32[8,8]",), ("x", "w")),
        OpSignature("aten.new_empty_strided.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("aten.copy.default", ("f32[8,8]",), ((1, 0), (0, 0))),
        OpSignature("aten.neg.default", ("f32[8,8]",), ((2, 0),)),
    )
    found = Schedule.of(plan([value(0, "aten.mm.default", None, Copy(3, COLUMNS))], ops=ops))
    assert found.reads == {3: {0: ((0, 0), (COLUMNS,))}}


def test_a_copy_for_an_op_that_does_not_read_the_value_is_refused():
    with pytest.raises(PlanError, match="op 1 is to read a copy of w, but does not read it"):
        Schedule.of(plan(weight_copies=[Copy(1, COLUMNS)]))


def test_an_annotation_of_another_op_is_refused():
    with pytest.raises(PlanError, match=r"annotates op 0 \(aten.bmm.default\), which is no op of its program"):
        Schedule.of(plan([value(0, "aten.bmm.default", COLUMNS)]))


def test_the_schedule_keeps_the_sequence():
    of = plan()
    assert Schedule.of(of).ops == of.program.ops
    assert dataclasses.replace(of).program.ops == of.program.ops


def test_a_copy_is_not_read_in_the_place_of_what_is_computed_from_the_value():
    """`w /= w.sum(-1, keepdim=True) + eps`: the gradient reads a clone of w, and the sum, made from w alone too."""
    ops = (
        OpSignature("aten.mm.default", ("f32[8,8]",), ("x", "w")),
        OpSignature("aten.sum.dim_IntList", ("f32[8,1]",), ((0, 0),)),
        OpSignature("aten.add.Tensor", ("f32[8,1]",), ((1, 0),)),
        OpSignature("aten.clone.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("aten.div.Tensor", ("f32[8,8]",), ((3, 0), (2, 0))),
    )
    found = Schedule.of(plan([value(0, "aten.mm.default", ROWS, Copy(4, COLUMNS))], ops=ops))
    assert found.reads == {4: {0: ((0, 0), (COLUMNS,))}}


def test_a_copy_behind_an_op_that_is_not_known_to_pass_values_on():
    """Read there, if that is the only tensor that can be meant; else the plan is refused."""
    ops = (
        OpSignature("aten.mm.default", ("f32[8,8]",), ("x", "w")),
        OpSignature("my.same.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("my.other.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("aten.add.Tensor", ("f32[8,8]",), ((1, 0), "w")),
        OpSignature("aten.add.Tensor", ("f32[8,8]",), ((1, 0), (2, 0))),
    )
    found = Schedule.of(plan([value(0, "aten.mm.default", ROWS, Copy(3, COLUMNS))], ops=ops))
    assert found.reads == {3: {0: ((0, 0), (COLUMNS,))}}
    with pytest.raises(PlanError, match="op 4 is to read a copy of output 0 of op 0, but does not read it"):
        Schedule.of(plan([value(0, "aten.mm.default", ROWS, Copy(4, COLUMNS))], ops=ops))


def test_a_copy_is_not_read_in_the_place_of_what_has_another_type():
    """Only what changes nothing is dropped between a value and who reads it."""
    ops = (
        OpSignature("aten.mm.default", ("f32[8,8]",), ("x", "w")),
        OpSignature("my.rows.default", ("f32[8]",), ((0, 0),)),
        OpSignature("my.same.default", ("f32[8]",), ((1, 0),)),
        OpSignature("aten.neg.default", ("f32[8]",), ((2, 0),)),
    )
    with pytest.raises(PlanError, match="op 3 is to read a copy of output 0 of op 0, but does not read it"):
        Schedule.of(plan([value(0, "aten.mm.default", ROWS, Copy(3, COLUMNS))], ops=ops))


def test_a_copy_is_read_behind_torch_xlas_marks():
    """Beside what is computed from the marked value alone, as the mean that a layer norm subtracts."""
    ops = (
        OpSignature("aten.mm.default", ("f32[8,8]",), ("x", "w")),
        OpSignature("xla.aot_mark_sharding.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("aten.neg.default", ("f32[8,8]",), ((1, 0),)),
        OpSignature("aten.sub.Tensor", ("f32[8,8]",), ((1, 0), (2, 0))),
    )
    found = Schedule.of(plan([value(0, "aten.mm.default", ROWS, Copy(3, COLUMNS))], ops=ops))
    assert found.reads == {3: {0: ((0, 0), (COLUMNS,))}}


def test_a_copy_is_read_behind_a_clone_and_not_behind_a_transpose():
    ops = (
        OpSignature("aten.mm.default", ("f32[8,8]",), ("x", "w")),
        OpSignature("aten.permute_copy.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("aten.clone.default", ("f32[8,8]",), ((0, 0),)),
        OpSignature("aten.mm.default", ("f32[8,8]",), ((2, 0), (1, 0))),
    )
    found = Schedule.of(plan([value(0, "aten.mm.default", ROWS, Copy(3, COLUMNS))], ops=ops))
    assert found.reads == {3: {0: ((0, 0), (COLUMNS,))}}
