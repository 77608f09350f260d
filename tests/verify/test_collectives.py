"""What compilers wrote (tests/verify/hlo, made by make.py there), and small texts for single forms.

The program of the recorded texts: 3 layers x + relu(x @ up) @ down in a scan, bf16, x [64, 256] split over data=2, up
[256, 512] and down [512, 256] over data and model=4. Per layer and weight an all-gather over data of [256, 128] (64
KiB) forwards and one backwards, one reduce-scatter of its gradient (64 KiB), and an all-reduce over model of [32, 256]
(16 KiB) forwards and one backwards.
"""

from pathlib import Path

import pytest

from autoshard.mesh import AxisPart, Mesh
from autoshard.verify.collectives import compiled_collectives, normalise

MESH = Mesh((2, 4), ("data", "model"))
KIB = 1024


def recorded(family):
    return (Path(__file__).parent / "hlo" / f"scan_{family}.txt").read_text()


@pytest.mark.parametrize(
    ("family", "gradients"),
    [
        ("gpu", {("reduce-scatter", ("data",)): 6 * 64 * KIB}),
        # This TPU compiler merges the slice of one gradient only; the CPU's slices the stacked ones after the loop.
        ("tpu", {("reduce-scatter", ("data",)): 3 * 64 * KIB, ("all-reduce", ("data",)): 3 * 64 * KIB}),
        ("cpu", {("all-reduce", ("data",)): 6 * 64 * KIB}),
    ],
)
def test_bytes_of_a_scanned_program(family, gradients):
    found = normalise(compiled_collectives(recorded(family), MESH, family))
    expected = {("all-gather", ("data",)): 12 * 64 * KIB, ("all-reduce", ("model",)): 6 * 16 * KIB, **gradients}
    assert found == dict(sorted(expected.items()))


def test_labels_point_at_the_ops():
    gathers = [c for c in compiled_collectives(recorded("cpu"), MESH, "cpu") if c.axes == ("model",)]
    assert {c.aten for c in gathers} == {1, 3}
    assert all(c.count == 3 for c in gathers)


def test_a_combined_collective_knows_where_each_part_comes_from():
    body = """  %a = f32[64,32] negate(%p), metadata={op_name="op4.1/aten__mm"}
  %b = f32[64,32] copy(%p), metadata={op_name="op5"}
  %c = f32[64,32] copy(%b)
  %x = (f32[64,32], f32[64,32], f32[16]) all-reduce(%a, %c, %q), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %y = f32[64,32] all-reduce(%c), replica_groups=[2,4]<=[8], to_apply=%add"""
    combined, single = compiled_collectives(module(body), MESH, "gpu")
    assert combined.parts == ((4, 8192), (5, 8192), (4, 64)), "what has no label counts to the whole's"
    assert (combined.aten, combined.bytes) == (4, 2 * 8192 + 64)
    assert (single.aten, single.parts) == (5, ())


def test_values_that_a_gpu_joins_into_one_array_are_parts_of_its_all_reduce():
    joined = """
%join (x: f32[2048], y: f32[16]) -> f32[2064] {
  %x = f32[2048] parameter(0)
  %y = f32[16] parameter(1)
  ROOT %all = f32[2064] concatenate(%x, %y), dimensions={0}LABEL
}"""
    body = """  %a = f32[64,32] negate(%p), metadata={op_name="op4.1/aten__mm"}
  %flat = f32[2048] bitcast(%a)
  %small = f32[16] negate(%q), metadata={op_name="op6/aten__sum"}
  %one = f32[2064] fusion(%flat, %small), kind=kLoop, calls=%join
  ROOT %x = f32[2064] all-reduce(%one), replica_groups=[2,4]<=[8], to_apply=%add"""
    (found,) = compiled_collectives(module(body, joined.replace("LABEL", "")), MESH, "gpu")
    assert (found.bytes, found.parts) == (8256, ((4, 8192), (6, 64)))
    own = joined.replace("LABEL", ', metadata={op_name="op9/aten__cat"}')
    (found,) = compiled_collectives(module(body, own), MESH, "gpu")
    assert (found.bytes, found.parts) == (8256, ()), "a program's own concatenation is one value"


def test_what_one_value_sends_to_each_device_is_no_part():
    pieces = ", ".join(["f32[16,32]"] * 4)
    body = f"""  %a = f32[16,32] slice(%p), metadata={{op_name="op4.1/aten__mm"}}
  ROOT %x = ({pieces}) all-to-all(%a, %a, %a, %a), replica_groups=[2,4]<=[8]"""
    (found,) = compiled_collectives(module(body), MESH, "cpu")
    assert (found.bytes, found.parts) == (8192, ())


def test_tpu_fuses_parts_of_one_async_collective_with_other_work():
    text = recorded("tpu")
    assert text.count("AsyncCollectiveStart") == text.count("AsyncCollectiveDone") > 0
    channels = [c.name for c in compiled_collectives(text, MESH, "tpu") if c.kind == "all-gather"]
    assert len(channels) == 4, "two weights forwards, two backwards, each printed up to three times"


def test_tpu_gathers_that_go_on_inside_a_loop_count_once():
    def fused(name, call):
        return f"""
%{name} (w.{name}: f32[64,32]) -> f32[256,32] {{
  %w.{name} = f32[64,32]{{1,0}} parameter(0)
  %all.{name} = f32[256,32]{{1,0}} all-gather(%w.{name}), channel_id=7, replica_groups=[2,4]<=[8], dimensions={{0}}
  {call}
}}
"""

    start, done = (
        f'ROOT %c.{end} = f32[256,32] custom-call(%all.{name}), custom_call_target="AsyncCollective{end}"'
        for name, end in (("start", "Start"), ("done", "Done"))
    )
    loop = """
%body (b: f32[64,32]) -> f32[64,32] {
  %b = f32[64,32]{1,0} parameter(0)
  %more = f32[256,32] fusion(%b), kind=kCustom, calls=%middle
  ROOT %same = f32[64,32]{1,0} copy(%b)
}

%until (u: f32[64,32]) -> pred[] {
  ROOT %u = f32[64,32]{1,0} parameter(0)
}
"""
    more = fused("start", start) + fused("middle", "ROOT %neg = f32[256,32] negate(%all.middle)") + fused("done", done)
    body = """  %a = f32[256,32] fusion(%p), kind=kCustom, calls=%start
  %l = f32[64,32] while(%p), condition=%until, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %z = f32[256,32] fusion(%p), kind=kCustom, calls=%done"""
    assert read(body, "tpu", more + loop) == [("all-gather", ("model",), 32768, 1)]


def test_tpu_reduce_scatters_that_share_a_channel_are_two():
    more = """
%all-reduce-scatter (w: f32[64,32]) -> f32[8,32] {
  %w = f32[64,32]{1,0} parameter(0)
  %sum = f32[64,32]{1,0} all-reduce(%w), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %at = s32[] constant(0)
  ROOT %part = f32[8,32]{1,0} dynamic-slice(%sum, %at, %at), dynamic_slice_sizes={8,32}
}

%all-reduce-scatter.1 (v: f32[64,32]) -> f32[8,32] {
  %v = f32[64,32]{1,0} parameter(0)
  %total = f32[64,32]{1,0} all-reduce(%v), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %from = s32[] constant(0)
  ROOT %mine = f32[8,32]{1,0} dynamic-slice(%total, %from, %from), dynamic_slice_sizes={8,32}
}
"""
    body = """  %x = f32[8,32] fusion(%p), kind=kCustom, calls=%all-reduce-scatter
  ROOT %y = f32[8,32] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"""
    assert read(body, "tpu", more) == [("reduce-scatter", ("data", "model"), 8192, 1)] * 2


def test_a_label_is_looked_for_on_both_sides_and_through_fusions():
    more = """
%start (w: f32[64,32]) -> f32[256,32] {
  %w = f32[64,32]{1,0} parameter(0)
  ROOT %all = f32[256,32]{1,0} all-gather(%w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}
"""
    gather = "  %x = f32[256,32] fusion(%p), kind=kCustom, calls=%start\n  %y = f32[256,32] copy(%x)\n"
    reader = '  ROOT %z = f32[256,32] negate(%y), metadata={op_name="op9.1/aten__mm"}'
    (found,) = compiled_collectives(module(gather + reader, more), MESH, "tpu")
    assert found.aten == 9


def test_another_mesh_is_refused():
    with pytest.raises(ValueError, match="compiled for 8 devices, the mesh has 4"):
        compiled_collectives(recorded("cpu"), Mesh((4,)), "cpu")


def module(body, more="", devices=8):
    return f"""HloModule m, num_partitions={devices}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{more}
ENTRY %main (p: f32[64,32]) -> f32[8] {{
  %p = f32[64,32]{{1,0}} parameter(0)
  %q = f32[16]{{0}} parameter(1)
  %h = bf16[64,32]{{1,0}} parameter(2)
  %id = u32[] partition-id()
  %zero = s32[] constant(0)
{body}
}}
"""


def read(body, family="gpu", more=""):
    return [(c.kind, c.axes, c.bytes, c.count) for c in compiled_collectives(module(body, more), MESH, family)]


ALONG_DATA = "replica_groups=[4,2]<=[2,4]T(1,0)"
ALONG_MODEL = "replica_groups=[2,4]<=[8]"
ALONG_BOTH = "replica_groups=[1,8]<=[8]"
IN_PAIRS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
NAMED = "replica_groups=mesh['a'=2,'b'=4] {'b'}"
PAIRS = "source_target_pairs={{0,1},{1,0}}"


@pytest.mark.parametrize(
    ("line", "kind", "axes", "size"),
    [
        (f"f32[64,32] all-reduce(%p), {ALONG_MODEL}", "all-reduce", ("model",), 8192),
        (f"f32[64,32] all-reduce(%p), {IN_PAIRS}", "all-reduce", (AxisPart(("model",), 2, 4),), 8192),
        (f"(f32[64,32], f32[16]) all-reduce(%p, %q), {ALONG_MODEL}", "all-reduce", ("model",), 8256),
        ("f32[128,32] all-gather(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}", "all-gather", ("data",), 16384),
        (f"((f32[64,32]), f32[128,32]) all-gather-start(%p), {ALONG_DATA}", "all-gather", ("data",), 16384),
        (f"(bf16[64,32]) all-gather-start(%h), {NAMED}, dimensions={{0}}", "all-gather", ("model",), 16384),
        (f"f32[8,32] reduce-scatter(%p), {ALONG_BOTH}", "reduce-scatter", ("data", "model"), 8192),
        (f"f32[64,32] all-to-all(%p), {ALONG_MODEL}, dimensions={{0}}", "all-to-all", ("model",), 8192),
        (f"(f32[64,32], f32[64,32]) collective-permute-start(%p), {PAIRS}", "collective-permute", ("model",), 8192),
    ],
)
def test_one_collective_of_each_form(line, kind, axes, size):
    assert read(f"  %x = {line}\n  ROOT %d = f32[8] all-reduce-done(%x)") == [(kind, axes, size, 1)]


def test_collectives_that_move_nothing_are_none():
    alone = "  %x = f32[64,32] all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add"
    stays = "  %x = f32[64,32] collective-permute(%p), source_target_pairs={{0,0},{1,1}}"
    assert read(alone) == read(stays) == []


def test_async_wrappers_and_branches_count_once():
    more = """
%wrapped (w: f32[64,32]) -> f32[64,32] {
  %w = f32[64,32]{1,0} parameter(0)
  ROOT %inner = f32[64,32]{1,0} all-to-all(%w), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
}

%other (w: f32[64,32]) -> f32[64,32] {
  ROOT %w = f32[64,32]{1,0} parameter(0)
}
"""
    body = """  %s = ((f32[64,32]), f32[64,32]) async-start(%p), calls=%wrapped
  %d = f32[64,32] async-done(%s), calls=%wrapped
  ROOT %c = f32[64,32] conditional(%zero, %d, %d), branch_computations={%wrapped, %other}"""
    assert read(body, more=more) == [("all-to-all", ("model",), 8192, 1)] * 2


def scattered(slice_size, table, family="cpu", last=""):
    """An all-reduce over model; every device goes on with a slice at `table[partition] * slice_size`."""
    more = f"""
%slice (v: f32[64,32], t: u32[8], i: u32[]) -> f32[{slice_size},32] {{
  %v = f32[64,32]{{1,0}} parameter(0)
  %t = u32[8]{{0}} parameter(1)
  %i = u32[] parameter(2)
  %which = u32[1]{{0}} dynamic-slice(%t, %i), dynamic_slice_sizes={{1}}
  %index = s32[1]{{0}} convert(%which)
  %size = s32[1]{{0}} constant({{{slice_size}}})
  %offset = s32[1]{{0}} multiply(%index, %size)
  %start = s32[] bitcast(%offset)
  %none = s32[] constant(0)
  %cut = f32[{slice_size},32]{{1,0}} dynamic-slice(%v, %start, %none), dynamic_slice_sizes={{{slice_size},32}}
  ROOT %twice = f32[{slice_size},32]{{1,0}} add(%cut, %cut)
}}
"""
    body = f"""  %where = u32[8]{{0}} constant({{{table}}})
  %x = (f32[64,32], f32[16]) all-reduce(%p, %q), replica_groups=[2,4]<=[8], to_apply=%add
  %big = f32[64,32]{{1,0}} get-tuple-element(%x), index=0
  %same = f32[64,32]{{1,0}} copy(%big)
  %small = f32[16]{{0}} get-tuple-element(%x), index=1
  {last}
  ROOT %f = f32[{slice_size},32] fusion(%same, %where, %id), kind=kLoop, calls=%slice"""
    return read(body, family, more)


def test_on_cpu_an_all_reduce_of_which_each_keeps_a_slice_is_a_reduce_scatter():
    both = [("reduce-scatter", ("model",), 8192, 1), ("all-reduce", ("model",), 64, 1)]
    assert scattered(16, "0, 1, 2, 3, 0, 1, 2, 3") == both
    # Split over the other axis as well: still none of a group takes another's slice.
    assert scattered(8, "0, 1, 2, 3, 4, 5, 6, 7") == both


@pytest.mark.parametrize(
    "arguments",
    [
        {"slice_size": 16, "table": "0, 1, 2, 3, 0, 1, 2, 3", "family": "gpu"},  # its compiler had its chance
        {"slice_size": 32, "table": "0, 0, 0, 0, 1, 1, 1, 1"},  # the group keeps one slice: data splits, not model
        {"slice_size": 32, "table": "0, 1, 0, 1, 0, 1, 0, 1"},  # two of each group keep the same
        {"slice_size": 16, "table": "0, 1, 2, 3, 0, 1, 2, 3", "last": "%use = f32[64,32] negate(%same)"},
        {"slice_size": 16, "table": "..."},
    ],
)
def test_other_uses_leave_it_an_all_reduce(arguments):
    assert {kind for kind, *_ in scattered(**arguments)} == {"all-reduce"}


def test_on_cpu_collectives_of_what_was_bf16_count_half():
    more = """
%widen (n: bf16[64,32]) -> f32[64,32] {
  %n = bf16[64,32]{1,0} parameter(0)
  ROOT %wide = f32[64,32]{1,0} convert(%n)
}
"""
    body = """  %f = f32[64,32] fusion(%h), kind=kLoop, calls=%widen
  %x = f32[64,32] all-reduce(%f), replica_groups=[2,4]<=[8], to_apply=%add
  %y = f32[64,32] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
  %narrow = bf16[64,32] convert(%y)
  ROOT %z = f32[64,32] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add"""
    assert [size for *_, size, _ in read(body, "cpu", more)] == [4096, 4096, 8192]
    assert [size for *_, size, _ in read(body, "gpu", more)] == [8192, 8192, 8192]
