"""The parts of the HLO protocol buffer that capture reads and edits (xla/service/hlo.proto, xla/xla_data.proto).

Only the fields used are declared; protobuf passes the others on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from autoshard.dtypes import DTYPES
from autoshard.program import TensorType

_FIELDS = (
    ("Module", "computations", 3, "Computation*"),
    ("Module", "host_program_shape", 4, "ProgramShape"),
    ("Module", "stack_frame_index", 17, "StackFrameIndex"),
    ("Computation", "instructions", 2, "Instruction*"),
    ("Computation", "root_id", 6, "int64"),
    ("Instruction", "id", 35, "int64"),
    ("Instruction", "operand_ids", 36, "int64*"),
    ("Instruction", "control_predecessor_ids", 37, "int64*"),
    ("StackFrameIndex", "file_names", 1, "bytes*"),
    ("StackFrameIndex", "function_names", 2, "bytes*"),
    ("StackFrameIndex", "file_locations", 3, "FileLocation*"),
    ("StackFrameIndex", "stack_frames", 4, "StackFrame*"),
    ("FileLocation", "file_name_id", 1, "int64"),
    ("FileLocation", "function_name_id", 2, "int64"),
    ("StackFrame", "file_location_id", 1, "int64"),
    ("StackFrame", "parent_frame_id", 2, "int64"),
    ("ProgramShape", "parameters", 1, "Shape*"),
    ("ProgramShape", "result", 2, "Shape"),
    ("Shape", "element_type", 2, "int64"),
    ("Shape", "dimensions", 3, "int64*"),
    ("Shape", "tuple_shapes", 4, "Shape*"),
)
"""Message, field, number, type; a star where repeated."""
_DTYPES = {dtype.number: dtype.name for dtype in DTYPES.values()}
"""PrimitiveType -> element type in StableHLO's spelling."""
_TUPLE = 13


def parse(module: bytes) -> Any:
    """A serialized HloModuleProto as a message with the fields above."""
    return _module_class().FromString(module)


@cache
def _module_class() -> Any:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    file = FileDescriptorProto(name="hlo.proto", syntax="proto3")
    messages = {name: file.message_type.add(name=name) for name in dict.fromkeys(each[0] for each in _FIELDS)}
    for message, name, number, kind in _FIELDS:
        one = kind.removesuffix("*")
        label = FieldDescriptorProto.LABEL_OPTIONAL if one == kind else FieldDescriptorProto.LABEL_REPEATED
        of_message = {"type": FieldDescriptorProto.TYPE_MESSAGE, "type_name": f".{one}"}
        held = of_message if one in messages else {"type": getattr(FieldDescriptorProto, f"TYPE_{one.upper()}")}
        messages[message].field.add(name=name, number=number, label=label, **held)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName("Module"))


def signature(module: Any) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """Types of the parameters and results of a module."""
    if not module.HasField("host_program_shape"):
        raise ValueError("this HLO module has no program shape")
    shape = module.host_program_shape
    return tuple(each for one in shape.parameters for each in _types(one)), tuple(_types(shape.result))


def _types(shape: Any) -> list[TensorType]:
    """The tensors of a shape: itself, or a tuple's elements."""
    if shape.element_type == _TUPLE:
        return [each for part in shape.tuple_shapes for each in _types(part)]
    return [TensorType(tuple(shape.dimensions), _DTYPES[shape.element_type])]


def drop_stacks(module: Any) -> None:
    """Drop the Python stacks of a module's instructions: every frame becomes the same one.

    Stacks contain local paths and lines; without them equal programs are equal bytes.
    """
    if not module.HasField("stack_frame_index"):
        return
    index = module.stack_frame_index
    frames = len(index.stack_frames)
    index.Clear()
    # One file and one function without a name, one location, and as many frames as before, all called
    # from one more: a frame without a caller is written as another kind of MLIR location.
    index.file_names.append(b"-")
    index.function_names.append(b"-")
    index.file_locations.add(file_name_id=1, function_name_id=1)
    for _ in range(frames):
        index.stack_frames.add(file_location_id=1, parent_frame_id=frames + 1)
    index.stack_frames.add(file_location_id=1)


def number_from_one(module: Any) -> None:
    """Renumber the instructions of each computation densely.

    torch_xla numbers instructions across the module, but XLA reads a computation into a table as long as its largest
    id: gigabytes for the many reducers of a large program.
    """
    for computation in module.computations:
        if computation.root_id >= 2 * len(computation.instructions):  # not numbered densely
            shift_ids(computation, 1 - min(each.id for each in computation.instructions))


def shift_ids(computation: Any, more: int) -> None:
    """Add an offset to every instruction's id."""
    computation.root_id += more
    for instruction in computation.instructions:
        instruction.id += more
        for ids in (instruction.operand_ids, instruction.control_predecessor_ids):
            ids[:] = [each + more for each in ids]
