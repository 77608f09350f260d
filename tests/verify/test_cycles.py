"""libtpu's cycles in small compiled programs, written by hand: what is counted how often, and what has none."""

from dataclasses import replace

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.graph.body import Body
from autoshard.graph.ops import Op
from autoshard.program import TensorType
from autoshard.verify.check import VerifyReport
from autoshard.verify.cycles import Cycles, check_clock, compiled_cycles, loop_trips
from autoshard.verify.fidelity import fidelity
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.judge import Judged
from autoshard.verify.targets import TargetError, parse_target
from tests.verify.small import program

V5E = load_device("tpu-v5e:2x4")
A = "f32[8,128]{1,0:T(8,128)}"
CARRIED = f"(s32[], {A})"


def kernel(name, cycles, operand="p", opcode="negate", more=""):
    config = f', backend_config={{"window_config":{{"estimated_cycles":"{cycles}","iteration_bounds":["1"]}}}}'
    return f"  %{name} = {A} {opcode}(%{operand}){more}{config}\n"


def body(name, lines, turned="moved"):
    """A loop's body that adds 1 to its counter."""
    return f"""%{name} (c: {CARRIED}) -> {CARRIED} {{
  %c = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %p = {A} get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
{lines}  ROOT %out = {CARRIED} tuple(%next, %{turned})
}}

%{name}_condition (c: {CARRIED}) -> pred[] {{
  %c = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

"""


def loop(name, operand, body, more=""):
    return f"  %{name} = {CARRIED} while(%{operand}), condition=%{body}_condition, body=%{body}{more}\n"


def found(lines, computations="", trips=None):
    text = f"HloModule m, is_scheduled=true\n\n{computations}ENTRY %main (p: {A}) -> {A} {{\n"
    text += f"  %p = {A} parameter(0)\n  %zero = s32[] constant(0)\n  %start = {CARRIED} tuple(%zero, %p)\n{lines}}}\n"
    return compiled_cycles(parse_hlo(text), V5E, trips)


def test_kernels_count_once_and_fusions_at_their_call():
    inner = f"%fused (p: {A}) -> {A} {{\n  %p = {A} parameter(0)\n{kernel('hidden', 10_000)}}}\n\n"
    cycles = found(kernel("a", 30) + kernel("b", 12, "a", "fusion", ", kind=kLoop, calls=%fused"), inner)
    assert (cycles.cycles, cycles.without, cycles.loops) == (42, {}, ())
    assert cycles.seconds == 42 / V5E.clock
    assert cycles.model_s >= 2 * V5E.kernel_overhead


def test_loops_in_loops_multiply():
    inner = body("inner", kernel("moved", 100))
    config = ', backend_config={"known_trip_count":{"n":"5"}}'
    taken = f"  %t = {CARRIED} tuple(%i, %half)\n"
    got = f"  %moved = {A} get-tuple-element(%l), index=1\n"
    outer = body("outer", kernel("half", 7) + taken + loop("l", "t", "inner", config) + got)
    cycles = found(kernel("a", 1) + loop("l", "start", "outer"), inner + outer)
    assert cycles.cycles == 1 + 3 * (7 + 5 * 100)
    assert [(kind, times) for kind, (times, _) in cycles.without.items()] == [("scalar op", 3 + 3 * 5)]
    assert cycles.loops == ()


@pytest.mark.parametrize(("trips", "times", "unknown"), [({7: 6}, 6, ()), ({8: 6}, 1, ("l",)), ({7: 0}, 0, ())])
def test_a_loop_that_does_not_say_how_often_it_turns_is_asked_of_the_program(trips, times, unknown):
    turning = body("turning", kernel("moved", 100)).replace("direction=LT", "direction=NE")
    named = ', metadata={op_name="op7/while"}'
    cycles = found(kernel("a", 1) + loop("l", "start", "turning", named), turning, trips)
    assert (cycles.cycles, cycles.loops) == (1 + 100 * times, unknown)
    assert ("counted once, their trips unknown: l" in str(cycles)) == bool(unknown)


def test_of_a_conditional_the_dearest_branch_counts():
    turning = body("turning", kernel("moved", 40))
    cheap = f"%cheap (p: {A}) -> {A} {{\n  %p = {A} parameter(0)\n{kernel('x', 90)}}}\n\n"
    dear = f"%dear (p: {A}) -> {A} {{\n  %p = {A} parameter(0)\n  %zero = s32[] constant(0)\n"
    dear += f"  %start = {CARRIED} tuple(%zero, %p)\n{loop('l', 'start', 'turning')}}}\n\n"
    for branches in ("branch_computations={%cheap, %dear}", "true_computation=%dear, false_computation=%cheap"):
        line = f"  %c = {A} conditional(%zero, %p, %p), {branches}\n"
        assert found(line, turning + cheap + dear).cycles == 3 * 40


SCATTER = f"""%deep (p: {A}, i: s32[8]) -> {A} {{
  %p = {A} parameter(0)
  %i = s32[8]{{0}} parameter(1)
  ROOT %s = {A} scatter(%p, %i, %p), to_apply=%sum
}}

%scattered (p: {A}, i: s32[8]) -> {A} {{
  %p = {A} parameter(0)
  %i = s32[8]{{0}} parameter(1)
  ROOT %f = {A} fusion(%p, %i), kind=kCustom, calls=%deep
}}

%all-reduce-scatter (p: {A}) -> {A} {{
  %p = {A} parameter(0)
  ROOT %r = {A} all-reduce(%p), replica_groups={{}}, to_apply=%sum
}}

"""


def test_what_carries_no_estimate_is_named_and_not_dropped():
    lines = f"""  %g = f32[64,128]{{1,0:T(8,128)}} all-gather(%p), replica_groups={{}}, dimensions={{0}}
  %rs = {A} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
  %s = ({A}, {A.replace("T(8,128)", "T(8,128)S(1)")}, u32[]) copy-start(%p)
  %d = {A.replace("T(8,128)", "T(8,128)S(1)")} copy-done(%s)
  %i = s32[8]{{0:T(128)}} iota(), iota_dimension=0
  %f = {A} fusion(%p, %i), kind=kCustom, calls=%scattered
  %k = {A} custom-call(%p), custom_call_target="tpu_custom_call"
  %u = s32[] add(%zero, %zero)
"""
    cycles = found(kernel("a", 5) + lines + kernel("late", 2**63 - 1, "k"), SCATTER)
    assert cycles.cycles == 5
    assert {kind: times for kind, (times, _) in cycles.without.items()} == {
        "all-gather": 1, "reduce-scatter": 1, "async copy": 1, "iota": 1, "scatter": 1, "tpu_custom_call": 1,
        "scalar op": 1, "negate": 1,
    }  # fmt: skip
    assert {kind for kind, (_, seconds) in cycles.without.items() if not seconds} == {
        "all-gather", "reduce-scatter", "async copy",
    }  # fmt: skip
    assert "1 tpu_custom_call (0.001 ms)" in str(cycles)
    assert cycles.as_dict()["without_estimate"]["scatter"]["kernels"] == 1


def looping(*counts):
    """A graph of loops that all come from aten op 3; the first has the others in its body."""
    _, graph = program()
    number = (TensorType((), "f32"),)
    inner = (Op(n, "while", (), number, {"trip_count": trips}, 3) for n, trips in enumerate(counts[1:]))
    attrs = {"trip_count": counts[0], "bodies": (Body(replace(graph, ops=tuple(inner))),)}
    return replace(graph, ops=(Op(0, "while", (), number, attrs, 3),))


@pytest.mark.parametrize(("counts", "trips"), [((4,), {3: 4}), ((4, 4), {3: 4}), ((4, 5), {}), ((None,), {})])
def test_the_program_says_how_often_its_loops_turn_unless_one_op_became_several(counts, trips):
    assert loop_trips(looping(*counts)) == trips


def test_a_target_or_a_kind_without_a_clock_says_what_to_do():
    check_clock(parse_target("tpu-v5e:2x4"), V5E)
    with pytest.raises(
        TargetError, match="only libtpu estimates cycles, and h100:8 is no TPU: choose a target such as"
    ):
        check_clock(parse_target("h100:8"), load_device("h100:8"))
    with pytest.raises(TargetError, match=r"the clock of device kind tpu-v5e is not known: .* a line such as clock = "):
        check_clock(parse_target("tpu-v5e:2x4"), replace(V5E, clock=0.0))


def test_a_step_by_libtpus_clock_adds_what_nothing_hides():
    """Kernels, those without an estimate unless they run beside others, and collectives that stand alone."""
    cycles = Cycles(3_000_000, 1.5e9, 0.001, {"gather": (1, 5e-4), "async copy": (9, 7e-4), "all-reduce": (2, 0.0)})
    judged = Judged(communication_s=0.004, compute_s=0.003, flops=0, bytes=0, collective_bytes=0, overlapped_s=0.005)
    report = VerifyReport(
        target=parse_target("tpu-v5e:2x4", 8),
        fidelity=fidelity((), ()),
        prediction=None,
        judged=judged,
        memory_bytes=0,
        cycles=cycles,
    )
    assert report.clock_s == pytest.approx(0.002 + 0.0005 + 0.002)
    serial = replace(report, judged=replace(judged, overlapped_s=None))
    assert serial.clock_s == pytest.approx(0.002 + 0.0005 + 0.004)
    assert replace(report, cycles=None).clock_s is None
