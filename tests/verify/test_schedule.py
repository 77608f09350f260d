from pathlib import Path

import pytest

from autoshard.cost.machine.collectives import seconds
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import load_device
from autoshard.mesh import Mesh
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.judge import judged
from autoshard.verify.schedule import overlapped_seconds
from autoshard.verify.work import compiled_work

MESH = Mesh((2, 4), ("data", "model"), "h100")
H100 = load_device("h100")
SIZE = 4 * 4096 * 4096


@pytest.mark.parametrize(("family", "device"), [("cpu", "cpu"), ("gpu", "h100"), ("tpu", "tpu-v5e")])
def test_a_schedule_lies_between_all_at_once_and_one_by_one(family, device):
    module = parse_hlo((Path(__file__).parent / "hlo" / f"scan_{family}.txt").read_text())
    kind, mesh = load_device(device), Mesh((2, 4), ("data", "model"), device)
    serial = judged(compiled_collectives(module, mesh, family), compiled_work(module, family), mesh, kind)
    overlapped = overlapped_seconds(module, mesh, kind, family)
    assert max(serial.communication_s, serial.compute_s) <= overlapped * (1 + 1e-9)
    assert overlapped <= serial.step_time_s * (1 + 1e-9)
    if family == "cpu":
        assert overlapped == pytest.approx(serial.step_time_s), "XLA's CPU collectives are synchronous"
    else:
        assert overlapped < serial.step_time_s


def played(body, more="", family="gpu"):
    text = f"""HloModule m, is_scheduled=true, num_partitions=8
{more}
ENTRY %main (p: f32[4096,4096]) -> f32[4096,4096] {{
  %p = f32[4096,4096]{{1,0}} parameter(0)
{body}
}}
"""
    return overlapped_seconds(parse_hlo(text), MESH, H100, family)


START = "  %s{0} = f32[4096,4096]{{1,0}} all-reduce-start(%p), channel_id={0}, replica_groups=[2,4]<=[8]\n"
DONE = "  %d{0} = f32[4096,4096]{{1,0}} all-reduce-done(%s{0})\n"
WORK = "  %w{0} = f32[4096,4096]{{1,0}} negate(%p)\n"
REDUCE = seconds("all-reduce", ("model",), SIZE, MESH, H100)
NEGATE = roofline_seconds(0, 2 * SIZE, "f32", H100)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("s1 d1 w1", REDUCE + NEGATE),
        ("s1 w1 d1", max(REDUCE, NEGATE)),
        # Collectives share the links: the second waits for the first.
        ("s1 s2 w1 d1 d2", max(2 * REDUCE, NEGATE)),
        ("w1 s1 w2 w3 d1", NEGATE + max(REDUCE, 2 * NEGATE)),
    ],
)
def test_what_stands_between_start_and_done_runs_beside_it(lines, expected):
    printed = {"s": START, "d": DONE, "w": WORK}
    assert played("".join(printed[line[0]].format(line[1]) for line in lines.split())) == pytest.approx(expected)


def test_loops_take_every_turn():
    more = f"""
%body (p: f32[4096,4096]) -> f32[4096,4096] {{
  %p = f32[4096,4096]{{1,0}} parameter(0)
{START.format(1)}{WORK.format(1)}{DONE.format(1)}  ROOT %r = f32[4096,4096]{{1,0}} negate(%d1)
}}

%condition (p: f32[4096,4096]) -> pred[] {{
  ROOT %p = pred[] parameter(0)
}}
"""
    loop = "  ROOT %l = f32[4096,4096] while(%p), condition=%condition, body=%body, "
    trips = 'backend_config={"known_trip_count":{"n":"7"}}'
    assert played(loop + trips, more) == pytest.approx(7 * (max(REDUCE, NEGATE) + NEGATE))


def test_what_a_tpu_starts_before_a_loop_is_not_moved_again_in_every_turn():
    """FSDP of a small decoder on v5e was 30.1 ms as scheduled, and 17.1 in sequence."""
    array = "f32[4096,4096]{1,0}"
    gather = f"%g = {array} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={{0}}"
    parts = [
        f"%{name} (p: f32[4096,4096]) -> f32[4096,4096] {{\n  %p = {array} parameter(0)\n  {gather}\n  {more}\n}}\n"
        for name, more in (
            ("first", f'ROOT %c = {array} custom-call(%g), custom_call_target="AsyncCollectiveStart"'),
            ("part", f"ROOT %c = {array} negate(%g)"),
            ("last", f'ROOT %c = {array} custom-call(%g), custom_call_target="AsyncCollectiveDone"'),
        )
    ]
    body = f"ROOT %r = {array} fusion(%p), kind=kCustom, calls=%part"
    more = f"{parts[0]}{parts[1]}{parts[2]}" + (
        f"%body (p: f32[4096,4096]) -> f32[4096,4096] {{\n  %p = {array} parameter(0)\n  {body}\n}}\n"
        "%until (p: f32[4096,4096]) -> pred[] {\n  ROOT %p = pred[] parameter(0)\n}\n"
    )
    turns = 'backend_config={"known_trip_count":{"n":"9"}}'
    lines = [
        f"%s = {array} fusion(%p), kind=kCustom, calls=%first",
        f"%l = {array} while(%p), condition=%until, body=%body, {turns}",
        f"ROOT %d = {array} fusion(%s), kind=kCustom, calls=%last",
    ]
    once = seconds("all-gather", ("model",), SIZE, MESH, H100)
    whole = played("\n".join(f"  {line}" for line in lines), more, "tpu")
    assert whole < 2 * once + 9 * 3 * NEGATE
    assert whole >= once
