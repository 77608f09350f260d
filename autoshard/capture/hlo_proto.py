"""The signature of an HLO module, read from its protocol buffer (xla/service/hlo.proto, xla/xla_data.proto)."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.capture.program import TensorType

_HOST_PROGRAM_SHAPE = 4  # HloModuleProto.host_program_shape: ProgramShapeProto
_PARAMETERS, _RESULT = 1, 2  # of ProgramShapeProto: ShapeProto
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES = 2, 3, 4  # of ShapeProto
_DTYPES = {
    1: "i1", 2: "i8", 3: "i16", 4: "i32", 5: "i64", 6: "ui8", 7: "ui16", 8: "ui32", 9: "ui64",
    10: "f16", 11: "f32", 12: "f64", 15: "complex<f32>", 16: "bf16", 18: "complex<f64>",
    19: "f8E5M2", 20: "f8E4M3FN", 21: "i4", 22: "ui4",
}  # fmt: skip
"""PrimitiveType -> element type in StableHLO's words."""
_TUPLE = 13


def signature(module: bytes) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """Types of the parameters and results of a serialized HloModuleProto."""
    for number, value in _fields(module):
        if number == _HOST_PROGRAM_SHAPE and isinstance(value, bytes):
            parameters, results = [], []
            for part, shape in _fields(value):
                if part == _PARAMETERS and isinstance(shape, bytes):
                    parameters += _types(shape)
                elif part == _RESULT and isinstance(shape, bytes):
                    results += _types(shape)
            return tuple(parameters), tuple(results)
    raise ValueError("this HLO module has no program shape")


def _types(shape: bytes) -> list[TensorType]:
    """The tensors of a ShapeProto: itself, or the parts of a tuple."""
    kind, dims, parts = 0, [], []
    for number, value in _fields(shape):
        if number == _ELEMENT_TYPE and isinstance(value, int):
            kind = value
        elif number == _DIMENSIONS:
            dims += [value] if isinstance(value, int) else list(_varints(value))
        elif number == _TUPLE_SHAPES and isinstance(value, bytes):
            parts += _types(value)
    return parts if kind == _TUPLE else [TensorType(tuple(dims), _DTYPES[kind])]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: varints as int, the others as bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if size is None:
            size, position = _varint(message, position)
        yield number, message[position : position + size]
        position += size


def _varints(packed: bytes) -> Iterator[int]:
    position = 0
    while position < len(packed):
        value, position = _varint(packed, position)
        yield value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
