"""What capture reads and changes of an HLO module's protocol buffer (xla/service/hlo.proto, xla/xla_data.proto)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.dtypes import DTYPES
from autoshard.program import TensorType

_HOST_PROGRAM_SHAPE = 4  # HloModuleProto.host_program_shape: ProgramShapeProto
_COMPUTATIONS = 3  # HloModuleProto.computations: HloComputationProto
_INSTRUCTIONS, _ROOT_ID = 2, 6  # of HloComputationProto
_ID, _OPERAND_IDS, _PREDECESSOR_IDS = 35, 36, 37  # of HloInstructionProto
_STACK_FRAME_INDEX = 17  # HloModuleProto.stack_frame_index: StackFrameIndexProto
_FILES, _FUNCTIONS, _LOCATIONS, _FRAMES = 1, 2, 3, 4  # of StackFrameIndexProto
_PARAMETERS, _RESULT = 1, 2  # of ProgramShapeProto: ShapeProto
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES = 2, 3, 4  # of ShapeProto
_DTYPES = {dtype.number: dtype.name for dtype in DTYPES.values()}
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


def without_stacks(module: bytes) -> bytes:
    """A serialized HloModuleProto whose instructions name no Python stack: every frame is one and the same.

    The stacks hold paths and lines of whoever captured; without them equal programs are equal bytes.
    """
    parts = []
    for number, value, raw in _raw(module):
        if number == _STACK_FRAME_INDEX:
            frames = sum(part == _FRAMES for part, _ in _fields(value))
            # One file and one function of no name, a place in them, and as many frames there as before, all called
            # from one more: a frame without a caller is written as another kind of MLIR location.
            caller = b"\x08\x01\x10" + _varint_bytes(frames + 1)
            index = _message(_FILES, b"-") + _message(_FUNCTIONS, b"-") + _message(_LOCATIONS, b"\x08\x01\x10\x01")
            index += _message(_FRAMES, caller) * frames + _message(_FRAMES, b"\x08\x01")
            raw = _message(_STACK_FRAME_INDEX, index)
        parts.append(raw)
    return b"".join(parts)


def with_ids_from_one(module: bytes) -> bytes:
    """The same module, the instructions of each computation numbered from its smallest id on.

    torch_xla numbers instructions through the whole module; XLA reads a computation into a table as long as its largest
    id, so that the bodies of a large program's many sums took gigabytes (GPT-2 of 200 layers: 16 GB).
    """
    return b"".join(
        _message(number, _from_one(value)) if number == _COMPUTATIONS else raw for number, value, raw in _raw(module)
    )


def _from_one(computation: bytes) -> bytes:
    fields = list(_raw(computation))
    instructions = [value for number, value, _ in fields if number == _INSTRUCTIONS]
    root = max((value for number, value, _ in fields if number == _ROOT_ID), default=0)
    if root < 2 * len(instructions):
        return computation  # numbered densely
    smallest = min(value for message in instructions for number, value, _ in _raw(message) if number == _ID)
    return _numbered(computation, 1 - smallest)


def _numbered(computation: bytes, more: int) -> bytes:
    """A HloComputationProto with that much more in every instruction's id."""

    def instruction(message: bytes) -> bytes:
        parts = []
        for number, value, raw in _raw(message):
            if number == _ID or (number in (_OPERAND_IDS, _PREDECESSOR_IDS) and isinstance(value, int)):
                raw = _varint_bytes(number << 3) + _varint_bytes(value + more)
            elif number in (_OPERAND_IDS, _PREDECESSOR_IDS):
                raw = _message(number, b"".join(_varint_bytes(one + more) for one in _varints(value)))
            parts.append(raw)
        return b"".join(parts)

    parts = []
    for number, value, raw in _raw(computation):
        if number == _INSTRUCTIONS:
            raw = _message(number, instruction(value))
        elif number == _ROOT_ID:
            raw = _varint_bytes(number << 3) + _varint_bytes(value + more)
        parts.append(raw)
    return b"".join(parts)


def _message(number: int, body: bytes) -> bytes:
    """A field of bytes: its key, its length, itself."""
    return _varint_bytes(number << 3 | 2) + _varint_bytes(len(body)) + body


def _varint_bytes(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


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


def _raw(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """(number, value, the field's own bytes) of each field."""
    position = 0
    while position < len(message):
        start = position
        number, value, position = _field(message, position)
        yield number, value, message[start:position]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: varints as int, the others as bytes."""
    position = 0
    while position < len(message):
        number, value, position = _field(message, position)
        yield number, value


def _field(message: bytes, position: int) -> tuple[int, int | bytes, int]:
    """(number, value, where the next one starts) of the field at `position`."""
    key, position = _varint(message, position)
    number, wire = key >> 3, key & 7
    if wire == 0:
        value, position = _varint(message, position)
        return number, value, position
    size = {1: 8, 5: 4}.get(wire)
    if size is None:
        size, position = _varint(message, position)
    return number, message[position : position + size], position + size


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
