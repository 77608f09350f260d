"""Collectives over several TPU slices, as libtpu takes them apart."""

import pytest

from autoshard.mesh import AxisPart, Mesh
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.slices import places

MESH = Mesh((2, 4), ("data", "model"), "tpu-v5e:2x2:2slices")


def transfer(name: str, kind: str, operand: str, sent: str, received: str, target: str = "{1,2}x{0:3}") -> str:
    """A send and its recv, as printed."""
    attributes = (
        f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="{name}",_xla_megascale_target="{target}",_xla_megascale_transfer_type="{kind}"}}'
    )
    return f"""
  %after.{name} = token[] after-all()
  %send.{name} = ({sent}, u32[], token[]) send(%{operand}, %after.{name}), channel_id=3, {attributes}
  %recv.{name} = ({received}, u32[], token[]) recv(%after.{name}), channel_id=2, {attributes}
  %send-done.{name} = token[] send-done(%send.{name}), channel_id=3, is_host_transfer=true
  %recv-done.{name} = ({received}, token[]) recv-done(%recv.{name}), channel_id=2, is_host_transfer=true
  %got.{name} = {received} get-tuple-element(%recv-done.{name}), index=0"""


def module(body: str, root: str) -> str:
    return f"""HloModule m, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (a: f32[64,32]) -> f32[64,32] {{
  %a = f32[64,32] parameter(0){body}
  ROOT %root = f32[64,32] copy(%{root})
}}
"""


def read(body: str, root: str, mesh: Mesh = MESH) -> list[tuple[str, tuple[str, ...], int]]:
    return [(each.kind, each.axes, each.bytes) for each in compiled_collectives(module(body, root), mesh, "tpu")]


SCATTER = (
    "\n  %rs = f32[64,8] reduce-scatter(%a), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={1}, to_apply=%add"
    "\n  %b = f32[8,8,8] bitcast(%rs)"
)
GATHER = (
    "\n  %c = f32[64,8] bitcast(%got.r)"
    "\n  %ag = f32[64,32] all-gather(%c), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={1}"
)


def test_an_all_reduce_that_was_taken_apart_is_one():
    body = SCATTER + transfer("r", "ALL_REDUCE", "b", "f32[8,8,8]", "f32[8,8,8]") + GATHER
    assert read(body, "ag") == [("all-reduce", ("data", "model"), 64 * 32 * 4)]


@pytest.mark.parametrize(("shape", "axes"), [((4, 2), ("data", "model")), ((8, 1), ("data",))])
def test_an_axis_within_and_across_slices_is_one(shape, axes):
    mesh = Mesh(shape, ("data", "model"), "tpu-v5e:2x2:2slices")
    body = SCATTER + transfer("r", "ALL_REDUCE", "b", "f32[8,8,8]", "f32[8,8,8]") + GATHER
    assert read(body, "ag", mesh) == [("all-reduce", axes, 64 * 32 * 4)]


def test_a_small_all_reduce_is_reduced_within_and_between_slices():
    inside = "\n  %ar = f32[64,32] all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add"
    body = inside + transfer("r", "ALL_REDUCE", "ar", "f32[64,32]", "f32[64,32]")
    assert read(body, "got.r") == [("all-reduce", ("data", "model"), 64 * 32 * 4)]


PART = (
    "\n  %ar = f32[64,32] all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add"
    "\n  %zero = s32[] constant(0)"
    "\n  %part = f32[64,8] dynamic-slice(%ar, %zero, %zero), dynamic_slice_sizes={64,8}"
)


def test_of_a_smaller_all_reduce_a_part_goes_over_the_network():
    body = PART + transfer("r", "ALL_REDUCE", "part", "f32[64,8]", "f32[64,8]") + GATHER
    assert read(body, "ag") == [("all-reduce", ("data", "model"), 64 * 32 * 4)]


def test_an_all_gather_goes_over_the_network_first():
    body = transfer("r", "ALL_GATHER", "a", "f32[32,8]", "f32[64,8]") + GATHER
    assert read(body, "ag") == [("all-gather", ("data", "model"), 64 * 32 * 4)]
    body = PART + transfer("r", "ALL_GATHER", "part", "f32[32,8]", "f32[64,8]") + GATHER  # a sum of its own before it
    sums, gathers = [("all-reduce", ("model",), 64 * 32 * 4)], [("all-gather", ("data", "model"), 64 * 32 * 4)]
    assert read(body, "ag") == sums + gathers


def test_between_slices_alone():
    body = transfer("r", "ALL_REDUCE", "a", "f32[64,32]", "f32[64,32]")
    assert read(body, "got.r") == [("all-reduce", ("data",), 64 * 32 * 4)]
    body = transfer("r", "ALL_TO_ALL", "a", "f32[64,32]", "f32[64,32]")
    assert read(body, "got.r") == [("all-to-all", ("data",), 64 * 32 * 4)]
    body = transfer("r", "ALL_GATHER", "a", "f32[64,32]", "f32[128,32]")
    assert read(body, "a") == [("all-gather", ("data",), 128 * 32 * 4)]


def test_within_a_slice_alone():
    body = "\n  %ar = f32[64,32] all-reduce(%a), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add"
    assert read(body, "ar") == [("all-reduce", (AxisPart(("model",), 2, 4),), 64 * 32 * 4)]
    body = "\n  %p = f32[64,32] collective-permute(%a), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}"
    assert read(body, "p") == [("collective-permute", ("model",), 64 * 32 * 4)]


def test_what_others_read_too_stays_apart():
    both = GATHER + "\n  %again = f32[64,8] negate(%got.r)"
    body = SCATTER + transfer("r", "ALL_REDUCE", "b", "f32[8,8,8]", "f32[8,8,8]") + both
    assert [kind for kind, _, _ in read(body, "ag")] == ["reduce-scatter", "all-reduce", "all-gather"]


def test_a_transfer_between_some_of_the_slices():
    mesh = Mesh((4, 4), ("data", "model"), "tpu-v5e:2x2:4slices")
    body = transfer("r", "ALL_REDUCE", "a", "f32[64,32]", "f32[64,32]", "{1,2}x{0:3}")
    assert read(body, "got.r", mesh) == [("all-reduce", (AxisPart(("data",), 2, 4),), 64 * 32 * 4)]


@pytest.mark.parametrize(
    ("kind", "target", "axes"),
    [
        ("ALL_TO_ALL", "{{100000,200000},{100002,200002},{100001,200001},{100003,200003}}", ("data",)),
        ("ALL_TO_ALL", "{{100000,100002,100001,100003,200000,200002,200001,200003}}", ("data", "model")),
        ("ONE_TO_ONE", "{{100000,200000},{200000,100000}}", ("data",)),
        ("ONE_TO_ONE", "{{100000,200002},{100002,200001}}", ("data", "model")),
    ],
)
def test_a_transfer_between_devices_by_number(kind, target, axes):
    text = transfer("r", kind, "a", "f32[64,32]", "f32[64,32]").replace('"{1,2}x{0:3}"', target)
    name = {"ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute"}[kind]
    assert read(text, "got.r") == [(name, axes, 64 * 32 * 4)]


def test_where_partitions_of_a_slice_stand():
    assert places(MESH, 8) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert places(MESH, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    inner = Mesh((4, 2), ("data", "model"), "tpu-v5e:2x2:2slices", ("ici", "dcn"))
    assert places(inner, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match="compiled for 2 devices, the mesh has 8"):
        places(MESH, 2)
