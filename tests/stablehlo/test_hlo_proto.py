"""The bytes of an HLO module that capture changes, held against XLA's own reading of them."""

import importlib

import pytest

hlo_proto = importlib.import_module("autoshard.stablehlo.hlo_proto")


def module_bytes(sums: int) -> bytes:
    """A module of that many sums, its instructions numbered through all computations, as torch_xla numbers them."""
    from jaxlib import _hlo

    regions = "\n".join(
        f"r{i} {{\n  x{i} = f32[] parameter(0)\n  y{i} = f32[] parameter(1)\n  ROOT z{i} = f32[] add(x{i}, y{i})\n}}\n"
        for i in range(sums)
    )
    body = "\n".join(
        f"  v{i} = f32[4] reduce(p, zero), dimensions={{0}}, to_apply=r{i}, control-predecessors={{zero}}"
        for i in range(sums)
    )
    names = ", ".join(f"v{i}" for i in range(sums))
    text = (
        f"HloModule many\n\n{regions}\nENTRY main {{\n  p = f32[8,4] parameter(0)\n  zero = f32[] constant(0)\n{body}\n"
        f"  ROOT all = ({', '.join(['f32[4]'] * sums)}) tuple({names})\n}}\n"
    )
    return through(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def through(module: bytes) -> bytes:
    """The same module with ids counted on from computation to computation."""
    parts, offset = [], 0
    for number, value, raw in hlo_proto._raw(module):
        if number == hlo_proto._COMPUTATIONS:
            ids = [
                v
                for n, message, _ in hlo_proto._raw(value)
                if n == hlo_proto._INSTRUCTIONS
                for k, v, _ in hlo_proto._raw(message)
                if k == hlo_proto._ID
            ]
            raw = hlo_proto._message(number, hlo_proto._numbered(value, offset + 1 - min(ids)))
            offset += len(ids)
        parts.append(raw)
    return b"".join(parts)


def largest_ids(module: bytes) -> list[int]:
    """The root's id of each computation."""
    return [
        value
        for number, computation, _ in hlo_proto._raw(module)
        if number == hlo_proto._COMPUTATIONS
        for field, value, _ in hlo_proto._raw(computation)
        if field == hlo_proto._ROOT_ID
    ]


@pytest.mark.parametrize("sums", [1, 40])
def test_ids_start_anew_in_each_computation_and_the_program_stays_the_same(sums: int) -> None:
    from jaxlib._jax import mlir

    given = module_bytes(sums)
    assert max(largest_ids(given)[:-1]) == 3 * sums - 1
    found = hlo_proto.with_ids_from_one(given)
    assert max(largest_ids(found)[:-1]) <= 6
    assert mlir.hlo_to_stablehlo(found) == mlir.hlo_to_stablehlo(given)
