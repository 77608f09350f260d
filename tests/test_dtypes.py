import jax
import jax.numpy as jnp
import pytest
from jaxlib import xla_client

from autoshard.dtypes import DTYPES, dtype_bytes, is_float, is_whole, numpy_dtype, torch_dtypes


def test_sizes_are_those_of_torch_and_numpy():
    assert all(dtype.itemsize == dtype_bytes(name) for dtype, name in torch_dtypes().items())
    assert all(numpy_dtype(name).itemsize == dtype_bytes(name) for name in DTYPES)
    assert dtype_bytes("tuple") == 4


@pytest.mark.parametrize("name", ["i1", "i8", "ui32", "f16", "f32", "bf16", "complex<f32>", "f8E4M3FN", "f8E5M2"])
def test_names_are_those_that_xla_prints(name: str):
    lowered = jax.jit(lambda x: x.reshape(-1)).lower(jax.ShapeDtypeStruct((2, 3), numpy_dtype(name)))
    assert f"tensor<2x3x{name}>" in lowered.as_text()
    assert f"{DTYPES[name].hlo}[6]" in lowered.as_text("hlo")
    assert is_float(name) == jnp.issubdtype(numpy_dtype(name), jnp.floating)
    assert is_whole(name) == (jnp.issubdtype(numpy_dtype(name), jnp.integer) or name == "i1")


def test_numbers_are_those_of_xla():
    known = {kind.name: int(kind.value) for kind in xla_client.PrimitiveType}
    ours = {dtype.hlo.upper(): dtype.number for dtype in DTYPES.values()}
    assert len(ours.keys() & known.keys()) > 20
    assert all(known[name] == ours[name] for name in ours.keys() & known.keys())
