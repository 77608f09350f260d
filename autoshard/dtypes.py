"""Element types: their names in StableHLO, torch, numpy and XLA's text, and their sizes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    """One element type.

    Attributes:
        name: StableHLO's name, used throughout autoshard.
        bits: of one element.
        torch: its name in torch, empty where captures never contain it.
        numpy: its name in numpy, ml_dtypes and jax.numpy.
        hlo: its name in XLA's printed HLO.
        number: XLA's `PrimitiveType`.
    """

    name: str
    bits: int
    torch: str
    numpy: str
    hlo: str
    number: int


_DTYPE_TABLE = """
i1            8   bool       bool_              pred          1
i2            2   -          int2               s2            26
i4            4   -          int4               s4            21
i8            8   int8       int8               s8            2
i16           16  int16      int16              s16           3
i32           32  int32      int32              s32           4
i64           64  int64      int64              s64           5
ui2           2   -          uint2              u2            27
ui4           4   -          uint4              u4            22
ui8           8   uint8      uint8              u8            6
ui16          16  -          uint16             u16           7
ui32          32  -          uint32             u32           8
ui64          64  -          uint64             u64           9
f16           16  float16    float16            f16           10
f32           32  float32    float32            f32           11
bf16          16  bfloat16   bfloat16           bf16          16
f64           64  float64    float64            f64           12
complex<f32>  64  complex64  complex64          c64           15
complex<f64>  128 complex128 complex128         c128          18
f4E2M1FN      4   -          float4_e2m1fn      f4e2m1fn      32
f8E3M4        8   -          float8_e3m4        f8e3m4        29
f8E4M3        8   -          float8_e4m3        f8e4m3        28
f8E4M3FN      8   -          float8_e4m3fn      f8e4m3fn      20
f8E4M3B11FNUZ 8   -          float8_e4m3b11fnuz f8e4m3b11fnuz 23
f8E4M3FNUZ    8   -          float8_e4m3fnuz    f8e4m3fnuz    25
f8E5M2        8   -          float8_e5m2        f8e5m2        19
f8E5M2FNUZ    8   -          float8_e5m2fnuz    f8e5m2fnuz    24
f8E8M0FNU     8   -          float8_e8m0fnu     f8e8m0fnu     33
"""

DTYPES = {
    name: Dtype(name, int(bits), torch.replace("-", ""), numpy, hlo, int(number))
    for name, bits, torch, numpy, hlo, number in map(str.split, _DTYPE_TABLE.strip().splitlines())
}

NO_FP8 = "training in fp8 goes through kernels and scales of its own, which are not captured; plan in bf16"

FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
"""Element types of annotated values inside a program: bool and integer values need no annotation, and one on a mask
makes the partitioner gather the floats it is computed from."""

_BYTES = {dtype.name: max(1, dtype.bits // 8) for dtype in DTYPES.values()}


def dtype_bytes(name: str) -> int:
    """Bytes of one element; types below a byte take one, unknown ones four."""
    return _BYTES.get(name, 4)


def is_dtype(name: str) -> bool:
    """Whether an element type is called so."""
    return name in _BYTES


def is_float(name: str) -> bool:
    """Whether elements are real floating point numbers."""
    return name.startswith(("f", "bf"))


def is_whole(name: str) -> bool:
    """Whether elements are integers or bools."""
    return name.startswith(("i", "ui"))


@cache
def torch_dtypes() -> dict[torch.dtype, str]:
    """torch dtype -> StableHLO's name, for those that captures contain."""
    import torch

    return {getattr(torch, dtype.torch): dtype.name for dtype in DTYPES.values() if dtype.torch}


@cache
def numpy_dtype(name: str) -> Any:
    """The numpy dtype of an element type; KeyError for an unknown one."""
    import ml_dtypes
    import numpy as np

    known = DTYPES[name].numpy
    return np.dtype(getattr(np, known, None) or getattr(ml_dtypes, known))
