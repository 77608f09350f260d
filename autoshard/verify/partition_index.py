"""Detects reduce-scatters written as an all-reduce and a slice.

GSPMD writes a reduce-scatter as an all-reduce and a dynamic-slice with offsets computed from the partition id. TPU and
GPU compilers merge the two; XLA's CPU compiler does not. Offsets are evaluated for every device at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.verify.hlo_text import Computation, Instruction, Module

Indices = NDArray[np.int64]
"""One value per device, shape `(devices, elements)`."""

# These pass on whole elements of their operand, in any order.
ELEMENT_PRESERVING = frozenset({"copy", "bitcast", "reshape", "transpose", "convert", "pad", "copy-start", "copy-done"})

_BINARY: dict[str, Callable[[Indices, Indices], Indices]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "shift-right-arithmetic": np.right_shift,
}
_COMPARE: dict[str, Callable[[Indices, Indices], NDArray[np.bool_]]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def readers(
    module: Module,
    computation: Computation,
    name: str,
    index: int | None = None,
    *,
    through_converts: bool = True,
) -> list[tuple[Computation, Instruction, str]]:
    """The effective readers of a value: through data movement, tuple elements, and fusion boundaries.

    Args:
        module, computation: where the value is.
        name: the instruction that makes it.
        index: which element, if that instruction makes a tuple.
        through_converts: look through a conversion to what reads its result.

    Returns:
        (computation, instruction, name under which it reads the value) for each; a value that leaves its computation
        other than through a fusion counts as read by the root.
    """
    found: list[tuple[Computation, Instruction, str]] = []
    moves = ELEMENT_PRESERVING if through_converts else ELEMENT_PRESERVING - {"convert"}
    todo: list[tuple[Computation, str, int | None]] = [(computation, name, index)]
    seen: set[tuple[str, str, int | None]] = set()
    while todo:
        where, value, element = todo.pop()
        if (where.name, value, element) in seen:
            continue
        seen.add((where.name, value, element))
        instruction = where.instructions[value]
        if instruction is where.root and not _leave(module, where, element, todo):
            found.append((where, instruction, value))
        for user in where.users.get(value, ()):
            if element is not None:
                if user.opcode == "get-tuple-element":
                    if tuple_index(user) == element:
                        todo.append((where, user.name, None))
                    continue
            elif user.opcode in moves and user.operands[0] == value:
                todo.append((where, user.name, None))
                continue
            elif user.opcode == "fusion" and user.called:
                inner = module.computations[user.called[0]]
                for position, operand in enumerate(user.operands):
                    if operand == value:
                        todo.append((inner, inner.parameters[position].name, None))
                continue
            elif user.opcode == "tuple" and user is where.root and module.callers.get(where.name):
                caller = module.callers[where.name][0]
                if caller[1].opcode == "fusion":
                    for position, operand in enumerate(user.operands):
                        if operand == value:
                            outer = module.computations[caller[0]]
                            todo.append((outer, caller[1].name, position))
                    continue
            found.append((where, user, value))
    return found


def _leave(
    module: Module, where: Computation, element: int | None, todo: list[tuple[Computation, str, int | None]]
) -> bool:
    """Follow a value that a fused computation returns to the fusions that call it."""
    callers = module.callers.get(where.name, ())
    if not callers or any(instruction.opcode != "fusion" for _, instruction in callers):
        return False
    for name, instruction in callers:
        todo.append((module.computations[name], instruction.name, element))
    return True


def is_scattered(
    module: Module, computation: Computation, name: str, index: int | None, groups: Sequence[Sequence[int]]
) -> bool:
    """Whether each device of every group uses a slice of the value that no other device of its group uses."""
    uses = readers(module, computation, name, index)
    if not uses:
        return False
    for where, user, value in uses:
        if user.opcode != "dynamic-slice" or user.operands[0] != value:
            return False
        if user.shapes[0].elements >= where.instructions[value].shapes[0].elements:
            return False
        offsets = [evaluate(module, where, operand) for operand in user.operands[1:]]
        if any(offset is None or offset.shape[1] != 1 for offset in offsets):
            return False
        starts = np.concatenate([offset for offset in offsets if offset is not None], axis=1)
        if any(len({tuple(starts[device].tolist()) for device in group}) < len(group) for group in groups):
            return False
    return True


def evaluate(module: Module, computation: Computation, name: str, depth: int = 0) -> Indices | None:
    """Evaluate integers computed from the partition id, per device; None where the instruction reads anything else."""
    instruction = computation.instructions.get(name)
    if instruction is None or depth > 64:
        return None
    devices = module.num_partitions
    opcode = instruction.opcode
    if opcode == "partition-id":
        return np.arange(devices, dtype=np.int64)[:, None]
    if opcode == "replica-id":
        return np.zeros((devices, 1), dtype=np.int64)
    if opcode == "constant":
        return _constant(instruction, devices)
    if opcode == "parameter":
        return _argument(module, computation, int(instruction.arguments), depth)
    if opcode == "fusion" and instruction.called and not instruction.shape_text.startswith("("):
        inner = module.computations[instruction.called[0]]
        return evaluate(module, inner, inner.root.name, depth + 1)
    if opcode not in _OPERATIONS and opcode not in ELEMENT_PRESERVING:
        return None
    operands = [evaluate(module, computation, operand, depth + 1) for operand in instruction.operands]
    known = [operand for operand in operands if operand is not None]
    if len(known) < len(operands) or not known:
        return None
    return _apply(instruction, known)


_OPERATIONS = frozenset(
    {*_BINARY, "divide", "remainder", "negate", "clamp", "select", "compare", "broadcast", "slice", "dynamic-slice"}
)


def _apply(instruction: Instruction, operands: list[Indices]) -> Indices | None:
    opcode = instruction.opcode
    if opcode in _BINARY:
        return _BINARY[opcode](*operands)
    if opcode in ("divide", "remainder"):
        if not operands[1].all():
            return None
        quotient = np.trunc(operands[0] / operands[1]).astype(np.int64)
        return quotient if opcode == "divide" else operands[0] - quotient * operands[1]
    if opcode == "negate":
        return -operands[0]
    if opcode == "clamp":
        low, value, high = operands
        return np.minimum(np.maximum(value, low), high)
    if opcode == "select":
        return np.where(operands[0] != 0, operands[1], operands[2])
    if opcode == "compare":
        match = re.search(r"direction=(\w+)", instruction.rest)
        return _COMPARE[match[1]](*operands).astype(np.int64) if match else None
    if opcode == "broadcast":
        elements = instruction.shapes[0].elements
        return np.repeat(operands[0], elements, axis=1) if operands[0].shape[1] == 1 else None
    if opcode == "slice":
        match = re.search(r"slice=\{\[(\d+):(\d+)(?::1)?\]\}", instruction.rest)
        return operands[0][:, int(match[1]) : int(match[2])] if match else None
    if opcode == "dynamic-slice":
        return _table(instruction, operands)
    return operands[0] if operands[0].shape[1] == instruction.shapes[0].elements else None


def _table(instruction: Instruction, operands: list[Indices]) -> Indices | None:
    """A clamped dynamic-slice of a table of one dim (leading dims of size one apart)."""
    table, start = operands[0], operands[-1]
    size = instruction.shapes[0].elements
    if start.shape[1] != 1:
        return None
    first = np.clip(start, 0, table.shape[1] - size)
    return np.take_along_axis(table, first + np.arange(size), axis=1)


def _argument(module: Module, computation: Computation, number: int, depth: int) -> Indices | None:
    """The value that the fusion calling `computation` passes as parameter `number`."""
    callers = module.callers.get(computation.name, ())
    if len(callers) != 1 or callers[0][1].opcode not in ("fusion", "call"):
        return None
    name, instruction = callers[0]
    return evaluate(module, module.computations[name], instruction.operands[number], depth + 1)


def _constant(instruction: Instruction, devices: int) -> Indices | None:
    literal = instruction.arguments
    if literal in ("true", "false"):
        return np.full((devices, 1), int(literal == "true"), dtype=np.int64)
    if not re.fullmatch(r"[\d\s,{}\-]+", literal):
        return None
    values = [int(number) for number in re.findall(r"-?\d+", literal)]
    if len(values) != instruction.shapes[0].elements:
        return None
    return np.tile(np.array(values, dtype=np.int64), (devices, 1))


def tuple_index(instruction: Instruction) -> int:
    """Index of a get-tuple-element."""
    match = re.search(r"index=(\d+)", instruction.rest)
    return int(match[1]) if match else 0
