import dataclasses
import json
import math
import os
import re
import stat
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from autoshard.api import Plan
from autoshard.errors import FileError
from autoshard.files import check_writable
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.plans.annotated import plan_of, program_info
from autoshard.plans.check import planned_for
from autoshard.plans.json_format import schema
from autoshard.plans.value import (
    ActivationKey,
    ActivationPlan,
    CollectiveTotal,
    Confirmation,
    Copy,
    ModuleCost,
    OpSignature,
    Options,
    PlanError,
    PlanMismatchError,
    Predicted,
    ProgramInfo,
    ReplicatedOp,
    SolverInfo,
    TensorPlan,
    signature,
)
from autoshard.program import AtenOp
from tests.plans import made as plans
from tests.test_mesh import specs

# --- hypothesis: any plan ----------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
naturals = st.integers(0, 2**40)
figures = st.floats(0, 1e9, allow_nan=False)
dtypes = st.sampled_from(["f32", "bf16", "i64", "i1", "f8E4M3FN"])
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda shape: Mesh(tuple(shape), (), "h100"))


def copies(mesh, rank):
    return st.lists(st.builds(Copy, naturals, specs(mesh.axis_names, rank)), max_size=2).map(tuple)


@st.composite
def tensors(draw, mesh):
    shape = tuple(draw(st.lists(naturals, max_size=3)))
    spec = draw(specs(mesh.axis_names, len(shape)))
    return TensorPlan(shape, draw(dtypes), spec, draw(copies(mesh, len(shape))))


@st.composite
def activations(draw, mesh):
    shape = tuple(draw(st.lists(naturals, max_size=3)))
    key = ActivationKey("torch_xla", draw(naturals), draw(names), draw(naturals))
    spec = draw(st.none() | specs(mesh.axis_names, len(shape)))
    return ActivationPlan(key, draw(names), shape, draw(dtypes), spec, draw(copies(mesh, len(shape))))


@st.composite
def any_plan(draw):
    mesh = draw(meshes)
    section = st.dictionaries(names, tensors(mesh), max_size=3)
    producers = st.none() | names | st.tuples(naturals, naturals)
    types = st.sampled_from(["f32[8,512]", "f32[]", "i1[3]"])
    ops = st.builds(OpSignature, names, st.lists(types).map(tuple), st.lists(producers, max_size=3).map(tuple), names)
    kinds = st.sampled_from(["all-reduce", "all-gather", "collective-permute"])
    totals = st.builds(CollectiveTotal, kinds, st.just(mesh.axis_names), naturals, naturals)
    some = st.lists(totals, max_size=2).map(tuple)
    phases = st.sampled_from(["forward", "backward", "optimizer", ""])
    modules = st.lists(st.builds(ModuleCost, st.text(max_size=5), phases, figures, figures, some), max_size=2).map(
        tuple
    )
    predicted = st.builds(Predicted, *[figures] * 5, some, naturals, modules)
    solver = st.builds(SolverInfo, names, figures, figures | st.none() | st.just(-math.inf), figures, names)
    hints = st.dictionaries(names, specs(mesh.axis_names), max_size=2)
    options = st.builds(
        Options, st.none() | naturals, hints, st.sampled_from(["all", "io", "none"]), st.booleans(), naturals
    )
    return Plan(
        ProgramInfo("0" * 64, "train", "torch_xla", {"torch": "2.9.0"}, ("linear",), tuple(draw(st.lists(ops)))),
        mesh,
        draw(options),
        *(draw(section) for _ in range(5)),
        tuple(draw(st.lists(activations(mesh), max_size=3))),
        draw(st.none() | predicted),
        draw(st.none() | solver),
        tuple(draw(st.lists(st.builds(ReplicatedOp, names, names, names, figures), max_size=2))),
    )


@given(any_plan())
def test_a_plan_read_back_is_the_same_plan(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


@given(any_plan())
def test_every_plan_satisfies_the_published_schema(plan):
    Draft202012Validator(schema()).validate(json.loads(plan.to_json()))


@given(any_plan())
def test_every_plan_can_be_printed(plan):
    assert str(plan).startswith("Plan of a training step")


def test_the_schema_is_one():
    Draft202012Validator.check_schema(schema())


# --- the format --------------------------------------------------------------------------------------------------


def test_the_keys_of_the_format_come_in_its_order():
    value = json.loads(plans.plan(replicated=plans.REPLICATED).to_json())
    assert list(value) == [
        "format", "version", "autoshard_version", "program", "mesh", "options", "parameters", "buffers", "inputs",
        "optimizer_state", "outputs", "activations", "predicted", "solver", "replicated_ops",
    ]  # fmt: skip
    assert (value["format"], value["version"]) == ("autoshard.plan", 1)
    assert list(value["program"]) == ["fingerprint", "kind", "frontend", "versions", "switches", "ops"]
    assert value["mesh"] == {"shape": [2, 4], "axis_names": ["data", "model"], "device": "tpu-v5e", "placement": []}
    assert value["parameters"]["h.1.weight"] == {"shape": [16, 16], "dtype": "f32", "spec": [["model"], []]}
    assert value["activations"][1] == {
        "key": {"frontend": "torch_xla", "index": 1, "name": "aten.tanh.default", "output": 0},
        "module": "h.0", "shape": [8, 16], "dtype": "f32", "spec": None,
        "copies": [{"consumer": 2, "spec": [["data"], []]}],
    }  # fmt: skip
    assert list(value["predicted"]) == [
        "step_time_s", "compute_s", "communication_s", "overlapped_s", "mfu", "collectives", "peak_memory_bytes",
    ]  # fmt: skip
    assert list(value["solver"]) == ["status", "objective", "bound", "gap", "backend"]
    assert list(value["replicated_ops"][0]) == ["op", "module", "reason", "cost_s"]


def test_what_a_compiler_said_of_its_memory_is_read_back_and_shown():
    said = Confirmation("fits", "tpu-v5e:2x4", "libtpu 0.0.51", 15_200_000_000, 2, 34.0)
    plan = replace(plans.plan(), info={"confirmed": asdict(said)})
    read = Plan.from_json(plan.to_json())
    assert (read, read.confirmed) == (plan, said)
    line = "  as compiled    15.2 GB per device: fits (libtpu 0.0.51 for tpu-v5e:2x4, 2 plans compiled in 34 s)"
    assert line in str(read).splitlines()
    missing = replace(plan, info={"confirmed": {"verdict": "not confirmed", "note": "no compiler", "later": 1}})
    assert missing.confirmed == Confirmation("not confirmed", note="no compiler")
    assert "  as compiled    not confirmed: no compiler" in str(missing).splitlines()
    assert plans.plan().confirmed is None


def test_results_that_replace_an_argument_are_not_listed_as_outputs():
    assert list(plans.plan().outputs) == ["loss"]


def test_floats_keep_nine_significant_digits():
    plan = plans.plan(solver=SolverInfo("feasible", 0.1234567891234, 0.1, 0.2, "cbc"))
    assert plan.solver.objective == 0.123456789
    assert '"objective": 0.123456789,' in plan.to_json()


def test_figures_that_are_not_finite_are_refused():
    with pytest.raises(PlanError, match=r"Predicted.compute_s is inf; a plan holds finite figures only"):
        replace(plans.PREDICTED, compute_s=math.inf)


def test_a_bound_that_bounds_nothing_is_none():
    solver = SolverInfo("time_limit", 1.0, -math.inf, math.inf, "highs")
    assert (solver.bound, solver.gap) == (None, None)


def test_every_plan_is_checked_against_its_mesh():
    plan = plans.plan()
    wrong = {**plan.parameters, "h.0.weight": replace(plan.parameters["h.0.weight"], spec=(("data", "rows"), ()))}
    with pytest.raises(
        PlanError, match=r"^parameters.h.0.weight: no mesh axis is called 'rows'; the mesh has data, model$"
    ):
        replace(plan, parameters=wrong)
    entry = replace(plan.activations[0], copies=(Copy(7, ((),)),))
    with pytest.raises(PlanError, match=r"^activations\[0\] has 2 dims, but the spec \[\] has 1$"):
        replace(plan, activations=(entry,))


# --- files -------------------------------------------------------------------------------------------------------


def test_saving_and_loading(tmp_path):
    path = tmp_path / "plan.json"
    plan = plans.saved(path)
    assert Plan.load(path) == plan
    assert path.read_text() == plan.to_json()
    assert os.listdir(tmp_path) == ["plan.json"]
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_saving_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    plan = plans.saved(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.load(tmp_path / "plan.json") == plan


def test_saving_to_what_is_no_file_does_not_replace_it():
    plans.saved("/dev/null")
    assert not os.path.isfile("/dev/null")


def test_a_path_that_cannot_be_written(tmp_path):
    for path, why in ((tmp_path / "no" / "plan.json", "No such file or directory"), (tmp_path, "it is a directory")):
        for attempt in (plans.plan().save, check_writable):
            with pytest.raises((PlanError, FileError), match=f"^cannot write {re.escape(str(path))}: {why}$"):
                attempt(path)
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_plan(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    plan = plans.saved(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlanError, match="No space left on device"):
        replace(plan, solver=None).save(path)
    assert os.listdir(tmp_path) == ["plan.json"]
    assert Plan.load(path) == plan


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"^cannot read .*missing.json: No such file or directory$"):
        Plan.load(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"binary.json is not JSON: "):
        Plan.load(tmp_path / "binary.json")


# --- refused -----------------------------------------------------------------------------------------------------


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(plan):
        for part in path:
            plan = plan[part]
        plan[last] = value

    return change


def drop(*path):
    def change(plan):
        for part in path[:-1]:
            plan = plan[part]
        del plan[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("version", 3), "version: this autoshard (0.1.0) reads versions 1 and 2 of the format, not 3"),
        (put("version", True), "version: this autoshard (0.1.0) reads versions 1 and 2 of the format, not true"),
        (drop("version"), "reads versions 1 and 2 of the format, not null"),
        (put("format", "alpa"), "format: expected 'autoshard.plan', found \"alpa\"; this is no plan of autoshard"),
        (drop("format"), "format: expected 'autoshard.plan', found no format field"),
        (drop("mesh"), "the top level: 'mesh' is a required property"),
        (put("extra", 1), "the top level: Additional properties are not allowed ('extra' was unexpected)"),
        (drop("mesh", "device"), "mesh: 'device' is a required property"),
        (put("mesh", "axis_names", ["data", "data"]), "mesh: mesh axis names must differ: data is used more than once"),
        (put("mesh", "shape", 0, 0), "mesh.shape[0]: 0 is less than the minimum of 1"),
        (put("mesh", "shape", [8]), "mesh: mesh shape (8,) has 1 axes but 2 names: data, model"),
        (put("program", "fingerprint", "abc"), 'program.fingerprint: "abc" does not look like a sha256 in hexadecimal'),
        (put("program", "kind", "serve"), 'program.kind: expected one of "forward", "train", found "serve"'),
        (put("program", "ops", 0, "outputs", 0, "f32"), 'program.ops[0].outputs[0]: "f32" does not look like a type'),
        (put("options", "memory", "16GB"), 'options.memory: expected integer or null, found "16GB"'),
        (put("parameters", "h.0.weight", "shape", 1, "x"), 'h.0.weight.shape[1]: expected integer, found "x"'),
        (put("parameters", "h.0.weight", "spec", [[]]), "parameters.h.0.weight has 2 dims, but the spec [] has 1"),
        (put("parameters", "h.0.weight", "spec", [["z"], []]), "no mesh axis is called 'z'; the mesh has data, model"),
        (put("inputs", "x", "spec", [["data"], ["data"]]), "inputs.x: axis 'data' appears twice"),
        (put("activations", 0, "spec", 0, [3]), "activations[0].spec[0][0]: expected string, found 3"),
        (put("activations", 1, "key", "index", -1), "activations[1].key.index: -1 is less than the minimum of 0"),
        (put("activations", 1, "copies", 0, "spec", [["bogus"], []]), "activations[1]: no mesh axis is called 'bogus'"),
        (put("predicted", "mfu", None), "predicted.mfu: expected number, found null"),
        (put("predicted", "collectives", 0, "kind", "broadcast"), "predicted.collectives[0].kind: expected one of"),
        (put("solver", "bound", "inf"), 'solver.bound: expected number or null, found "inf"'),
        (put("info", {"confirmed": {"verdict": "maybe"}}), 'info.confirmed.verdict: expected one of "fits", "not'),
        (put("info", {"confirmed": {}}), "info.confirmed: 'verdict' is a required property"),
        (put("info", {"bars": []}), "info.bars: expected object, found"),
        (put("info", {"bars": {"step": "x", "memory": 0.1, "tie": 0.1, "level": ""}}), "bars.step: expected number"),
        (put("info", {"bars": {"step": 0.1, "memory": 0.1, "level": ""}}), "info.bars: 'tie' is a required property"),
        (put("info", {"hidden": "x"}), "info.hidden: expected number"),
    ],
)  # fmt: skip
def test_malformed_plans_are_refused_with_the_path_of_the_bad_field(change, message):
    value = json.loads(plans.plan().to_json())
    change(value)
    with pytest.raises(PlanError) as refused:
        Plan.from_json(json.dumps(value), "p.json")
    assert str(refused.value).startswith("p.json: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.json is not JSON: Expecting value"),
        ("{", "p.json is not JSON: "),
        ("[]", "p.json: a plan is a JSON object, not []"),
        ('{"version": NaN}', "p.json is not JSON: NaN is not a JSON number"),
        ("[" * 100_000, "p.json is not JSON: "),
    ],
)
def test_what_is_no_plan_is_refused(text, message):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        Plan.from_json(text, "p.json")


def changed(**changes):
    return replace(plans.program(), **changes)


def with_op(index, **changes):
    ops = list(plans.program().ops)
    ops[index] = replace(ops[index], **changes)
    return changed(ops=tuple(ops))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (plans.program(kind="forward"), "the plan is for a training step, this is a forward pass"),
        (
            plans.program(switches=()),
            "the plan was captured with the switches linear, this program with none",
        ),
        (plans.program(width=32), "parameter h.0.weight is f32[32,32], the plan has f32[16,16]"),
        (plans.program(layers=3), "parameter h.2.weight (f32[16,16]) is not in the plan"),
        (plans.program(layers=1), "parameter h.1.weight (f32[16,16]) of the plan is missing"),
        (
            plans.program(activation="relu"),
            "op 1 in h.0 is aten.relu.default -> f32[8,16], the plan has aten.tanh.default -> f32[8,16]",
        ),
        (
            with_op(2, outputs=(plans.f32(4, 16),)),
            "op 2 in h.1 (aten.mm.default) makes f32[4,16], the plan has f32[8,16]",
        ),
        (
            changed(ops=plans.program().ops[:3]),
            "it ends after 3 ops; the plan goes on with op 3, aten.tanh.default -> f32[8,16]",
        ),
        (
            changed(ops=(*plans.program().ops, replace(plans.program().ops[0], index=4))),
            "it goes on after the plan's 4 ops with aten.mm.default -> f32[8,16] in h.0",
        ),
    ],
)  # fmt: skip
def test_another_program_is_refused_with_the_first_difference(other, difference):
    with pytest.raises(PlanMismatchError) as refused:
        plans.plan().check_program(other)
    assert str(refused.value) == f"this plan is for another program: {difference}"


def test_another_wiring_of_the_same_ops_is_another_program():
    other = with_op(2, inputs=((1, 0), "h.0.weight"))
    with pytest.raises(PlanMismatchError) as refused:
        plans.plan().check_program(other)
    assert str(refused.value) == (
        "this plan is for another program: op 2 in h.1 (aten.mm.default) reads (output 0 of op 1, h.0.weight), "
        "the plan has (output 0 of op 1, h.1.weight)"
    )


def test_the_same_ops_in_another_order_are_the_same_program():
    """As where a model loops over a set, whose order is another in each process."""
    one = plans.program()
    first = replace(one.ops[0], inputs=("x", "h.1.weight"))
    mine = replace(one, ops=(first, one.ops[1], replace(one.ops[2], inputs=("x", "h.0.weight")), *one.ops[3:]))
    theirs = replace(
        one,
        ops=(
            replace(mine.ops[2], index=0),
            replace(mine.ops[0], index=1),
            replace(mine.ops[3], index=2, inputs=((0, 0), None)),
            replace(mine.ops[1], index=3, inputs=((1, 0), None)),
        ),
    )
    plan = plans.plan()
    plan = replace(plan, program=program_info(mine))
    plan = replace(plan, activations=tuple(replace(each, copies=()) for each in plan.activations))
    found = planned_for(plan, theirs)
    assert found.program.ops == tuple(map(signature, theirs.ops))
    there = {each.key.index: each.spec for each in found.activations}
    here = {each.key.index: each.spec for each in plan.activations}
    assert there == {(1, 3, 0, 2)[index]: spec for index, spec in here.items()}
    assert planned_for(found, mine) == plan
    assert planned_for(plan, mine) is plan


def test_of_two_equal_ops_each_stays_with_its_users():
    """Gemma 3 converts positions once for each kind of attention, in the order of a set."""
    f32, one = plans.f32(8, 16), plans.program()
    twin = replace(one.ops[0], inputs=("x",))

    def order(first, second):
        ops = [replace(twin, index=0), AtenOp(1, "aten.mul.Tensor", "h.0", "forward", (f32,), ((0, 0), first))]
        ops += [replace(twin, index=2), AtenOp(3, "aten.mul.Tensor", "h.0", "forward", (f32,), ((2, 0), second))]
        return replace(one, ops=tuple(ops))

    mine, theirs = order("h.0.weight", "h.1.weight"), order("h.1.weight", "h.0.weight")
    plan = replace(plans.plan(), program=program_info(mine), activations=(), parameters=plans.plan().parameters)
    value = ActivationPlan(ActivationKey("torch_xla", 0, twin.name, 0), "h.0", (8, 16), "f32", (("data",), ()))
    plan = replace(plan, activations=(value,))
    (found,) = planned_for(plan, theirs).activations
    assert (found.key.index, found.spec) == (2, value.spec)


def test_the_same_program_is_accepted():
    plans.plan().check_program(plans.program())
    plans.plan().check_program(changed(versions={"torch": "2.9.1"}, stablehlo=b"other bytes"))


def test_another_mesh_is_refused():
    plan = plans.plan()
    message = r"^this plan is for the mesh 2x4 \(data=2, model=4\) of tpu-v5e, not .*; plan again for that mesh$"
    plan.check_mesh(Mesh((2, 4), ("data", "model"), "tpu-v5e"))
    for other in (
        Mesh((4, 2), (), "tpu-v5e"),
        Mesh((2, 4), ("x", "y"), "tpu-v5e"),
        Mesh((2, 4), (), "h100"),
        Mesh((8,), (), "tpu-v5e"),
    ):
        with pytest.raises(PlanMismatchError, match=message):
            plan.check_mesh(other)


# --- annotations -------------------------------------------------------------------------------------------------


def test_a_plan_says_what_its_annotations_say():
    program = plans.program()
    graph = plans.graph(program)
    weight, hidden, unpinned = Value(0), graph.aten_outputs[0, 0], graph.aten_outputs[1, 0]
    written = Annotations(
        {weight: ((), ("model",)), hidden: (("data",), ("model",))},
        {(weight, 2): ((), ()), (unpinned, 2): (("data",), ())},
    )
    plan = Plan.of(plan_of(graph, plans.MESH, written))
    read = plan.annotations(graph)
    assert read.copies == written.copies
    arguments = {Value(i) for i, argument in enumerate(program.arguments) if argument.role != "scalar"}
    assert {value: spec for value, spec in read.pins.items() if value in written.pins} == written.pins
    assert set(read.pins) == arguments | {hidden}
    assert all(not any(read.pins[value]) for value in arguments - {weight})
    assert Plan.from_json(plan.to_json()).annotations(graph) == read


def test_hops_are_kept_and_a_plan_without_any_is_as_it_was():
    graph = plans.graph(plans.program())
    weight = Value(0)
    copies = {(weight, 0): ((), ("data",)), (weight, 2): ((), ("data",)), (weight, 3): ((), ())}
    hops = {(weight, ((), ("data",))): ((("data",), ("model",)), ((), ("model", "data")))}
    plan = Plan.of(plan_of(graph, plans.MESH, Annotations({weight: (("data",), ())}, copies, hops)))
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.annotations(graph).hops == hops
    assert plan.to_json().count('"hops"') == 2
    assert '"hops"' not in plans.plan().to_json()
    name = graph.program.arguments[0].name
    tensor = plan.parameters[name]
    torn = replace(tensor, copies=(tensor.copies[0], replace(tensor.copies[1], hops=()), *tensor.copies[2:]))
    with pytest.raises(PlanError, match="different hops"):
        replace(plan, parameters={**plan.parameters, name: torn}).annotations(graph)
    wrong = replace(tensor, copies=(replace(tensor.copies[0], hops=((("nowhere",), ()),)),))
    with pytest.raises(PlanError, match="no mesh axis"):
        replace(plan, parameters={**plan.parameters, name: wrong})


def test_results_are_recorded_as_propagation_has_them():
    graph = plans.graph(plans.program())
    loss = graph.outputs[0]
    outputs = Plan.of(plan_of(graph, plans.MESH, Annotations(), outputs={loss: ()})).outputs
    assert outputs == {"loss": TensorPlan((), "f32", ())}


def test_an_annotation_that_lowering_cannot_write_is_refused():
    graph = plans.graph(plans.program())
    inside = Value(graph.outputs[0].op - 1)
    with pytest.raises(PlanError, match=r"op \d+ \(multiply\) is inside an aten op: lowering cannot annotate it"):
        Plan.of(plan_of(graph, plans.MESH, Annotations({inside: (("data",), ())})))


def test_annotations_of_another_graph_are_refused():
    with pytest.raises(PlanMismatchError, match=r"parameter h\.0\.weight is"):
        plans.plan().annotations(plans.graph(plans.program(width=32)))


def test_a_value_pinned_twice_is_refused():
    plan, program = plans.plan(), plans.program()
    entry = replace(plan.activations[0], spec=((), ()))
    with pytest.raises(PlanError, match=r"output 0 of op 0 \(aten.mm.default\) is pinned to \[\],\[\], but"):
        replace(plan, activations=(*plan.activations, entry)).annotations(plans.graph(program))


def test_an_entry_for_a_value_that_is_not_there_is_refused():
    plan, program = plans.plan(), plans.program()
    entry = replace(plan.activations[0], key=ActivationKey("torch_xla", 1, "aten.tanh.default", 1))
    with pytest.raises(PlanError, match=r"^output 1 of op 1 \(aten.tanh.default\) is not a value"):
        replace(plan, activations=(entry,)).annotations(plans.graph(program))


# --- the report --------------------------------------------------------------------------------------------------


def test_the_report_says_what_splits_what():
    text = str(plans.plan(plans.program(layers=6), options=Options(memory=16 * 10**9, hints={"x": (("data",), ())})))
    lines = [re.sub(r"  +", "  ", line) for line in text.splitlines()]
    assert lines[0] == "Plan of a training step (12 aten ops) on 2x4 (data=2, model=4) of tpu-v5e"
    assert "  with hints x=[data, -]" in lines
    assert "  inputs  x  f32[8,16]  [data, -]" in lines
    assert "  h.0  weight  f32[16,16]  [-, model]  whole" in lines
    assert "  h.2,4  weight  f32[16,16]  [-, model]" in lines
    assert "  h.1,3,5  weight  f32[16,16]  [model, -]" in lines
    assert "  optimizer state  6 tensors  as its parameter" in lines
    assert "  h.0-5  1 value: tanh  not pinned  [data, -]" in lines
    assert "  h.0,2,4  1 value: mm  [data, model]" in lines
    assert "  step time  12.3 ms; 11 ms with collectives beside kernels" in lines
    assert "  MFU  34.0%, in sequence, recomputation not counted" in lines
    assert "  all-reduce  over data  x3  12.35 MB per device" in lines
    assert "  peak memory  3.2 GB of 16 GB per device" in lines
    assert "Solver: optimal, objective 12.3 ms, bound 12.3 ms, gap 0 % (highs)" in lines


def test_the_tensors_of_a_list_of_parameters_are_one_line_of_the_report():
    made = plans.plan()
    one = next(iter(made.parameters.values()))
    several = {f"scales.{i}": one for i in (0, 1, 2, 5)} | {"layers.0.scales.0": one, "layers.1.scales.1": one}
    lines = [re.sub(r"  +", "  ", line) for line in str(replace(made, parameters=several)).splitlines()]
    tensors = [line.split("  ")[1:3] for line in lines if "scales" in line]
    assert tensors == [["layers.0.scales", "0"], ["layers.1.scales", "1"], ["scales", "0-2,5"]]
    assert lines[-1] == "Every op has a sharding rule."


def test_the_report_names_what_was_replicated_for_want_of_a_rule():
    text = str(plans.plan(replicated=plans.REPLICATED))
    assert "Replicated for want of a rule: 7 ops, 8 us of a step\n  fft in filter: no rule (2 us)\n" in text
    assert text.endswith("  and 2 more")


def test_plans_are_values():
    assert plans.plan() == plans.plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plans.plan().solver = None
