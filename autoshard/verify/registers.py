"""What a compiled kernel gives a device's units to do, as `cost/machine/cycles.py` counts it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autoshard.cost.machine.cycles import TILE, Done, Products, class_of, convolved
from autoshard.cost.machine.tiles import ROWS
from autoshard.verify.hlo_text import ArrayShape, Computation, Instruction, Module

LOOPS = frozenset(
    """gather scatter sort reduce-window select-and-scatter custom-call rng-bit-generator while all-reduce all-gather
    reduce-scatter all-to-all dynamic-update-slice""".split()  # noqa: SIM905
)
"""Opcodes that are timed otherwise, in a fusion too."""

_IMAGES = 4
"""Dims of an array of images."""
_PAGE = 4 * TILE
"""Bytes of a register."""
_MINOR = re.compile(r"\w+\[[\d,]*\]\{(\d+)")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_GROUPS = re.compile(r"feature_group_count=(\d+)")
_BATCH = re.compile(r'lhs_batch_dims=\{[\d,]*\}|"lhs_batch_dimensions":\[[^\]]*\]')
_LIBRARY = ("__cublas$", "__onednn$matmul")
_REDUCED = re.compile(r"dimensions=\{([\d,]*)\}")


def registers(
    module: Module,
    flops: Callable[[Computation, Instruction], Mapping[str, float]],
    computation: Computation,
    kernel: Instruction,
) -> Done | None:
    """What a top-level instruction or fusion does; None where it is timed otherwise.

    Args:
        flops: dtype -> FLOP of an instruction's products.
    """
    vector: defaultdict[str, float] = defaultdict(float)
    products = []
    largest = max(kernel.shapes, key=lambda shape: shape.elements, default=None)
    narrow = largest is not None and largest.bytes < 4 * largest.elements
    for inside, one in _inside(module, computation, kernel):
        call = one.opcode == "custom-call" and one.target.startswith(_LIBRARY)
        if one.opcode in LOOPS and not call:
            return None
        if one.opcode == "dot" or call:
            products.append(_matrices(sum(flops(inside, one).values()), inside, one, narrow))
        elif one.opcode == "convolution":
            found = _products(sum(flops(inside, one).values()), inside, one, narrow)
            if found is None:
                return None
            products.append(found)
        elif one.opcode == "reduce":
            source = inside.instructions[one.operands[0]]
            lanes = _minor(source) in _reduced(one)
            vector["summed_lanes" if lanes else "summed_rows"] += _registers(source.shapes[0])
        elif one.shapes and (kind := class_of(one.opcode.replace("-", "_"))) is not None:
            vector[kind] += _registers(one.shapes[0])
    read = _read(module, computation, kernel)
    vector["tiles"] = max(map(_registers, (*read, *kernel.shapes)), default=0.0)
    vector["read"] = sum(shape.stored_bytes for shape in read) / _PAGE
    vector["written"] = sum(shape.stored_bytes for shape in kernel.shapes) / _PAGE
    return Done(tuple(replace(one, wide=_wide(one, read)) for one in products), dict(vector))


def _read(module: Module, computation: Computation, kernel: Instruction) -> list[ArrayShape]:
    """The arrays that a kernel reads: of an operand of which it reads slices alone, these."""
    found: list[ArrayShape] = []
    inner = module.computations[kernel.called[0]] if kernel.opcode == "fusion" else None
    for number, name in enumerate(kernel.operands):
        parameter = None if inner is None else inner.parameters.get(number)
        slices = None if inner is None or parameter is None else _slices(module, inner, parameter.name)
        if slices is None:
            slices = list(computation.instructions[name].shapes) if name in computation.instructions else []
        found += slices
    return found


def _slices(module: Module, computation: Computation, name: str) -> list[ArrayShape] | None:
    """The slices of a value that a fused computation reads; None where it reads all of it."""
    found: list[ArrayShape] = []
    for user in computation.users.get(name, ()):
        parts: list[ArrayShape] | None = None
        if user.opcode == "bitcast":
            parts = _slices(module, computation, user.name)
        elif user.opcode in ("slice", "dynamic-slice") and name not in user.operands[1:]:
            parts = list(user.shapes)
        elif user.opcode == "fusion" and user.operands.count(name) == 1:
            inner = module.computations[user.called[0]]
            parameter = inner.parameters.get(user.operands.index(name))
            parts = None if parameter is None else _slices(module, inner, parameter.name)
        if parts is None:
            return None
        found += parts
    return found


def _wide(product: Products, read: Sequence[ArrayShape]) -> int:
    """How many operands of a product its kernel reads in f32."""
    operands = product.batch * product.m * product.k, product.batch * product.k * product.n
    return sum(any(each.dtype == "f32" and each.elements == size for each in read) for size in operands)


def _inside(module: Module, computation: Computation, kernel: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions of a fusion, nested fusions included; of anything else itself."""
    if kernel.opcode != "fusion":
        yield computation, kernel
        return
    for name in kernel.called:
        inner = module.computations[name]
        for one in inner.instructions.values():
            if one.opcode == "fusion":
                yield from _inside(module, inner, one)
            else:
                yield inner, one


def _registers(shape: ArrayShape) -> float:
    """Registers of an array; of few images each tile takes one, though it does not fill it."""
    rows = shape.rows if len(shape.dims) >= _IMAGES else ROWS
    return (shape.elements + shape.padding) / TILE * max(1.0, ROWS / rows)


def _minor(instruction: Instruction) -> int | None:
    """The minor-most dim of an instruction's first result."""
    found = _MINOR.search(instruction.shape_text)
    return int(found[1]) if found else None


def _reduced(reduce: Instruction) -> list[int]:
    found = _REDUCED.search(reduce.rest)
    return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _matrices(flops: float, computation: Computation, product: Instruction, narrow: bool) -> Products:
    """The matrices of a dot, or of a library's call."""
    operands, made = list(computation.operand_shapes(product)), product.shapes[0]
    found = _BATCH.search(product.rest)
    dims = [int(dim) for dim in re.findall(r"\d+", found[0])] if found else []
    batch = math.prod(operands[0].dims[dim] for dim in dims)
    contracted = flops / 2 / max(made.elements, 1)
    columns = operands[1].elements / max(batch * contracted, 1)
    return Products(batch, made.elements / max(batch * columns, 1), columns, contracted, narrow)


def _products(flops: float, computation: Computation, product: Instruction, narrow: bool) -> Products | None:
    """A convolution, which libtpu writes products as too: batch dims are windows as large as the dim."""
    labels = _LABELS.search(product.rest)
    operands = list(computation.operand_shapes(product))
    made = product.shapes[0]
    if labels is None or len(operands) < 2 or not made.elements:
        return None
    left, right, out = labels.groups()
    lhs, rhs = operands[0].dims, operands[1].dims
    window = _WINDOW.search(product.rest)
    given = dict(item.split("=") for item in window[1].split()) if window else {}
    batch, free, slides = 1, [], False
    sizes = [*rhs]
    for place in filter(str.isdigit, sorted(out)):
        reads, size, makes = lhs[left.index(place)], rhs[right.index(place)], made.dims[out.index(place)]
        if reads == 1:
            sizes[right.index(place)] = 1  # all other taps are on padding
        if size == makes == reads:
            batch *= size
        elif makes > 1:
            free.append(place)
            slides = slides or size > 1
    if slides or len(free) > 1:
        groups = _GROUPS.search(product.rest)
        attrs = {
            "rhs": [right.index(each) for each in ("o", "i", *filter(str.isdigit, sorted(out)))],
            "out": [out.index(each) for each in ("b", "f", *filter(str.isdigit, sorted(out)))],
            "lhs_dilation": [int(size) for size in given.get("lhs_dilate", "1").split("x")],
            "feature_groups": int(groups[1]) if groups else 1,
        }
        return convolved(sizes, made.dims, attrs, narrow)
    columns = made.dims[out.index("f")]
    return Products(batch, made.elements / columns / batch, columns, flops / 2 / made.elements, narrow)
