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
    parsed, offset = hlo_proto.parse(module), 0
    for computation in parsed.computations:
        hlo_proto.shift_ids(computation, offset + 1 - min(each.id for each in computation.instructions))
        offset += len(computation.instructions)
    return parsed.SerializeToString()


@pytest.mark.parametrize("sums", [1, 40])
def test_ids_start_anew_in_each_computation_and_the_program_stays_the_same(sums: int) -> None:
    from jaxlib._jax import mlir

    given = module_bytes(sums)
    module = hlo_proto.parse(given)
    assert max(each.root_id for each in module.computations[:-1]) == 3 * sums
    hlo_proto.number_from_one(module)
    assert max(each.root_id for each in module.computations[:-1]) <= 6
    assert mlir.hlo_to_stablehlo(module.SerializeToString()) == mlir.hlo_to_stablehlo(given)
