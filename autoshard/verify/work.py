"""FLOPs of products and bytes of memory traffic of the kernels in a compiled program."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.attention.form import Form
from autoshard.cost.machine.compute import taps_on_input
from autoshard.cost.machine.cycles import Done
from autoshard.dtypes import DTYPES
from autoshard.experts.grouped import NAMED
from autoshard.verify.hlo_text import ArrayShape, Computation, Instruction, Module, aten_index, parse_hlo
from autoshard.verify.registers import registers
from autoshard.verify.targets import Family

# Ops without a kernel: names, views, the done halves of async ops (their starts count), and control flow.
_FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all add-dependency
    opt-barrier domain""".split()  # noqa: SIM905
)
_FREE_CALLS = frozenset({"AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape"})
_FUSED_ATTENTION = "__cudnn$fmha"
_MOSAIC, _TRITON = "tpu_custom_call", "__gpu$xla.gpu.triton"
_FLOPS = re.compile(r'"cost_estimate":\{[^{}]*"flops":"(\d+)"')
_BODY = re.compile(r'"body":"([^"]*)"')
_GRID = re.compile(r"iteration_bounds = array<i64: ([\d, ]+)>")
COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast)"
)
ASYNC_COPIES = frozenset({"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"})
_PARTIAL_READS = frozenset({"slice", "dynamic-slice", "gather"})
_DTYPE_NAMES = {dtype.hlo: dtype.name for dtype in DTYPES.values()}


@dataclass(frozen=True)
class Attention:
    """A fused attention kernel of a GPU.

    Attributes:
        sizes: batch, heads, kv_heads, queries, keys, features of keys and of values.
    """

    sizes: tuple[int, ...]
    form: Form
    forward: bool

    @property
    def flops(self) -> float:
        """Two products of the forward kernel, five of the backward one, over the scores that the mask leaves."""
        batch, heads, _, queries, keys, features, values = self.sizes
        products = features + values if self.forward else 3 * features + 2 * values
        return 2.0 * batch * heads * self.form.attended(queries, keys) * products


@dataclass(frozen=True)
class Kernel:
    """One top-level op or fusion of a compiled program.

    Attributes:
        name: the instruction.
        flops: operand dtype (StableHLO's spelling) -> FLOPs of its dots and convolutions, per execution.
        bytes: memory traffic per execution; tile padding counts, on-chip buffers do not.
        count: executions per step.
        launches: 1, or 0 for an async copy, and on a TPU for scalar-unit work.
        aten: index of the aten op in its metadata, or None.
        attention: if it is a fused attention of a GPU.
        registers: what its units do; None of loops and calls that are timed otherwise.
        copies: whether it is an async copy, which other kernels run beside.
    """

    name: str
    flops: dict[str, float] = field(hash=False)
    bytes: float
    count: int = 1
    launches: int = 1
    aten: int | None = None
    attention: Attention | None = None
    registers: Done | None = field(default=None, repr=False)
    copies: bool = False


@dataclass(frozen=True)
class CompiledWork:
    """The kernels of one device's program, in program order, without collectives."""

    kernels: tuple[Kernel, ...]

    @property
    def flops_by_dtype(self) -> dict[str, float]:
        """FLOPs of dots and convolutions per device and step, by dtype of their operands."""
        totals: dict[str, float] = {}
        for kernel in self.kernels:
            for dtype, flops in kernel.flops.items():
                totals[dtype] = totals.get(dtype, 0.0) + flops * kernel.count
        return dict(sorted(totals.items()))

    @property
    def flops(self) -> float:
        """FLOPs of dots and convolutions per device and step."""
        return sum(self.flops_by_dtype.values())

    @property
    def bytes(self) -> float:
        """Bytes of device memory read and written per device and step."""
        return sum(kernel.bytes * kernel.count for kernel in self.kernels)


def compiled_work(hlo: str | Module, family: Family) -> CompiledWork:
    """The kernels of an optimized HLO module.

    Args:
        hlo: the text, or the parsed module.
        family: of the compiler; on `tpu` arrays in memory space 1 (VMEM) cost no memory traffic.
    """
    module = parse_hlo(hlo) if isinstance(hlo, str) else hlo
    return CompiledWork(tuple(Work(module, family == "tpu").kernels(module.entry, 1)))


class Work:
    """A walk over the computations that run; `compiled_work` starts at the entry."""

    def __init__(self, module: Module, on_chip_is_free: bool) -> None:
        """See `compiled_work`; `on_chip_is_free`: arrays in memory space 1 cost no bytes."""
        self.module = module
        self.on_chip_is_free = on_chip_is_free
        self.flops_of: dict[str, dict[str, float]] = {}

    def kernels(self, name: str, count: int) -> Iterator[Kernel]:
        """Kernels of a computation that runs `count` times."""
        computation = self.module.computations[name]
        for instruction in computation.instructions.values():
            yield from self.at(computation, instruction, count)

    def at(self, computation: Computation, instruction: Instruction, count: int = 1) -> Iterator[Kernel]:
        """Kernels of one top-level instruction and of the computations that it runs."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")) or COLLECTIVE.match(opcode):
            return
        if opcode == "while":
            trips = self.module.trip_count(instruction)
            for called in instruction.called:
                yield from self.kernels(called, count * (1 if trips is None else trips))
        elif opcode in ("call", "conditional") or (opcode in ("async-start", "custom-call") and instruction.called):
            for called in instruction.called:
                yield from self.kernels(called, count)
        elif not self.is_free(instruction):
            yield Kernel(
                instruction.name,
                self.flops(computation, instruction),
                self.bytes(computation, instruction),
                count,
                0 if opcode in ASYNC_COPIES or self.is_scalar(computation, instruction) else 1,
                aten_index(instruction.op_name),
                self.attention(computation, instruction),
                registers(self.module, self.flops, computation, instruction),
                opcode in ASYNC_COPIES,
            )

    def is_scalar(self, computation: Computation, instruction: Instruction) -> bool:
        """Whether an instruction runs on a TPU's scalar unit: numbers from numbers alone."""
        read = [computation.instructions.get(name) for name in instruction.operands]
        around = [instruction, *(one for one in read if one is not None)]
        return self.on_chip_is_free and not any(shape.dims for one in around for shape in one.shapes)

    def is_free(self, instruction: Instruction) -> bool:
        """Whether a call or fusion takes no time of its own: a wrapped collective is no kernel."""
        if instruction.opcode == "custom-call":
            return instruction.target in _FREE_CALLS
        if instruction.opcode != "fusion":
            return False
        return any(name.startswith("all-reduce-scatter") for name in instruction.called) or bool(
            self.module.async_ends(instruction)
        )

    # ---- FLOPs

    @staticmethod
    def attention(computation: Computation, instruction: Instruction) -> Attention | None:
        """What a call of a GPU's attention kernel computes; None of anything else."""
        if not instruction.target.startswith(_FUSED_ATTENTION):
            return None
        return fused_attention(instruction, _shapes(computation, instruction))

    def flops(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        """dtype -> FLOPs of the dots and convolutions in an instruction and its nested computations."""
        if instruction.opcode == "dot":
            return _add({}, _dot_flops(computation, instruction))
        if instruction.opcode == "convolution":
            return _add({}, _convolution_flops(instruction, _shapes(computation, instruction)))
        if instruction.opcode == "custom-call":
            return _add({}, _library_flops(computation, instruction))
        found: dict[str, float] = {}
        if instruction.opcode in ("fusion", "call", "async-start", "conditional"):
            for name in instruction.called:
                for dtype, flops in self.computation_flops(name).items():
                    found[dtype] = found.get(dtype, 0.0) + flops
        elif instruction.opcode == "while":
            trips = self.module.trip_count(instruction) or 1
            for name in instruction.called:
                for dtype, flops in self.computation_flops(name).items():
                    found[dtype] = found.get(dtype, 0.0) + flops * trips
        return found

    def computation_flops(self, name: str) -> dict[str, float]:
        """dtype -> FLOPs of a whole computation."""
        if name not in self.flops_of:
            found: dict[str, float] = {}
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                for dtype, flops in self.flops(computation, instruction).items():
                    found[dtype] = found.get(dtype, 0.0) + flops
            self.flops_of[name] = found
        return self.flops_of[name]

    # ---- bytes

    def bytes(self, computation: Computation, instruction: Instruction) -> float:
        """Memory traffic in bytes of one top-level instruction."""
        opcode = instruction.opcode
        operands = [computation.instructions.get(name) for name in instruction.operands]
        known = [operand for operand in operands if operand is not None]
        if opcode in ASYNC_COPIES:
            return self.copy_bytes(instruction, known)
        if opcode in _PARTIAL_READS:
            return self.size(instruction) * 2 + sum(map(self.size, known[1:]))
        if opcode == "dynamic-update-slice":
            return 2.0 * self.size(known[1]) if len(known) > 1 else 0.0
        if opcode == "scatter" and len(known) >= 3:
            arrays = len(known) // 2
            return self.size(known[arrays]) + 3 * sum(map(self.size, known[arrays + 1 :]))
        if opcode == "fusion" and instruction.called:
            inner = self.module.computations[instruction.called[0]]
            read = 0.0
            for number, operand in enumerate(operands):
                if operand is not None:
                    read += min(self.size(operand), self.parameter_bytes(inner, number, operand))
            return read + self.written(inner, instruction)
        again = _turns(instruction)
        return self.size(instruction) + sum(self.size(one) * (again if place else 1) for place, one in enumerate(known))

    def size(self, instruction: Instruction) -> float:
        """Bytes of an instruction's result in device memory."""
        return float(sum(map(self.array_bytes, instruction.shapes)))

    def array_bytes(self, shape: ArrayShape) -> int:
        """Bytes of an array with padding, if it is in device memory; else 0."""
        return 0 if self.on_chip_is_free and shape.on_chip else shape.stored_bytes

    def copy_bytes(self, instruction: Instruction, operands: list[Instruction]) -> float:
        """An async copy moves its smaller array once per end in device memory."""
        arrays = [shape for shape in instruction.shapes if shape.elements > 1 or shape.dims]
        source = operands[0].shapes[0] if operands and operands[0].shapes else None
        if not arrays or source is None:
            return 0.0
        moved = min(shape.stored_bytes for shape in arrays)
        target = next((shape for shape in arrays if shape != source), source)
        ends = [source, target]
        return float(sum(moved for shape in ends if not (self.on_chip_is_free and shape.on_chip)))

    def parameter_bytes(self, inner: Computation, number: int, operand: Instruction) -> float:
        """Bytes that a fusion reads of one operand: of its slices where it reads nothing else."""
        parameter = inner.parameters.get(number)
        if parameter is None:
            return self.size(operand)
        if self.on_chip_is_free and all(shape.on_chip for shape in operand.shapes):
            return 0.0
        read, todo = 0.0, [parameter.name]
        while todo:
            name = todo.pop()
            for user in inner.users.get(name, ()):
                if user.opcode == "bitcast":
                    todo.append(user.name)
                elif user.opcode in _PARTIAL_READS and user.operands[0] == name and name not in user.operands[1:]:
                    read += user.bytes
                elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                    continue  # updated in place
                elif _scatters(user) and user.operands[0] == name and name not in user.operands[1:]:
                    read += _scattered(inner, user)
                elif COLLECTIVE.match(user.opcode) or (user.opcode == "tuple" and user is inner.root):
                    continue  # moved by a collective in parallel to the fusion, or only passed on
                else:
                    return self.size(operand)
        return read

    def written(self, inner: Computation, fusion: Instruction) -> float:
        """Bytes that a fusion writes: of an array updated in place, only the update."""
        root = inner.root
        roots = [inner.instructions.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
        if len(roots) != len(fusion.shapes):
            return self.size(fusion)
        total = 0.0
        for one, shape in zip(roots, fusion.shapes, strict=True):
            while one is not None and one.opcode == "bitcast":
                one = inner.instructions.get(one.operands[0])
            if one is not None and (one.opcode == "parameter" or COLLECTIVE.match(one.opcode)):
                continue
            update = None
            if one is not None and one.opcode == "dynamic-update-slice":
                update = inner.instructions.get(one.operands[1])
            elif one is not None and _scatters(one) and _is_parameter(inner, one.operands[0]):
                total += min(self.array_bytes(shape), _scattered(inner, one))
                continue
            total += min(self.array_bytes(shape), update.bytes) if update is not None else self.array_bytes(shape)
        return total


def _turns(instruction: Instruction) -> int:
    """How often an attention kernel reads keys and values: once per block of rows.

    Its grid, which libtpu writes as text, has rows and columns as its last two dims. The first operand, queries or
    logits, is read once.
    """
    body = _BODY.search(instruction.rest) if instruction.target == _MOSAIC else None
    try:
        grid = _GRID.search(base64.b64decode(body[1]).decode(errors="replace")) if body else None
    except ValueError:  # a user's own kernel, of another form
        grid = None
    bounds = [int(bound) for bound in grid[1].split(",")] if grid else []
    return bounds[-2] if len(bounds) > 1 and bounds[-1] > 1 else 1


def _scatters(instruction: Instruction) -> bool:
    """Whether an instruction scatters into a single array."""
    return instruction.opcode == "scatter" and len(instruction.operands) == 3


def _scattered(inner: Computation, scatter: Instruction) -> int:
    """Bytes of an array that a scatter changes: several updates of one element meet in the caches."""
    updates = inner.instructions.get(scatter.operands[2])
    return scatter.bytes if updates is None else min(scatter.bytes, updates.bytes)


def _is_parameter(inner: Computation, name: str) -> bool:
    """Whether a name is a fusion's parameter, perhaps reshaped."""
    found = inner.instructions.get(name)
    while found is not None and found.opcode == "bitcast":
        found = inner.instructions.get(found.operands[0])
    return found is not None and found.opcode == "parameter"


def _add(totals: dict[str, float], found: tuple[str, float]) -> dict[str, float]:
    dtype, flops = found
    if flops:
        totals[_DTYPE_NAMES[dtype]] = flops
    return totals


def _shapes(computation: Computation, instruction: Instruction) -> list[ArrayShape]:
    return list(computation.operand_shapes(instruction))


def _dot_flops(computation: Computation, instruction: Instruction) -> tuple[str, float]:
    operands = _shapes(computation, instruction)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
    return _wider(operands), 2.0 * instruction.shapes[0].elements * math.prod(operands[0].dims[dim] for dim in dims)


def _wider(operands: list[ArrayShape]) -> str:
    """The dtype that a product of two arrays runs in: the wider."""
    return max(operands[:2], key=lambda shape: (shape.bytes / max(shape.elements, 1), shape.dtype)).dtype


def _convolution_flops(
    instruction: Instruction, shapes: list[ArrayShape], out: ArrayShape | None = None
) -> tuple[str, float]:
    """2 x batch x output features x input features of a group x pairs of output position and tap on real input."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    out = out or instruction.shapes[0]
    if labels is None or len(shapes) < 2:
        return "f32", 0.0
    lhs, rhs = shapes[0].dims, shapes[1].dims
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    given = dict(item.split("=") for item in window[1].split()) if window else {}
    pairs = 1.0
    for i, spatial in enumerate(sorted(label for label in labels[1] if label.isdigit())):
        pairs *= taps_on_input(
            lhs[labels[1].index(spatial)],
            rhs[labels[2].index(spatial)],
            out.dims[labels[3].index(spatial)],
            stride=int(_nth(given.get("stride"), i, "1")),
            low=int(_nth(given.get("pad"), i, "0_0").split("_")[0]),
            lhs_dilation=int(_nth(given.get("lhs_dilate"), i, "1")),
            rhs_dilation=int(_nth(given.get("rhs_dilate"), i, "1")),
        )
    features = out.dims[labels[3].index("b")] * out.dims[labels[3].index("f")] * rhs[labels[2].index("i")]
    return _wider(shapes), 2.0 * features * pairs


def _nth(text: str | None, i: int, default: str) -> str:
    return text.split("x")[i] if text else default


def fused_attention(instruction: Instruction, shapes: Sequence[ArrayShape]) -> Attention:
    """What cuDNN's attention kernel computes, of its operands' shapes."""
    batch, heads, queries, features = shapes[0].dims
    _, kv_heads, keys, _ = shapes[1].dims
    values = shapes[2].dims[3]
    window = re.search(r'"sliding_window_length": ?"?(\d+)', instruction.rest)
    form = Form(
        1.0,
        re.search(r'"mask_type": ?"CAUSAL"', instruction.rest) is not None,
        int(window[1]) or None if window else None,
    )
    sizes = (batch, heads, kv_heads, queries, keys, features, values)
    return Attention(sizes, form, "Backward" not in instruction.target)


def _grouped_flops(result: ArrayShape, shapes: Sequence[ArrayShape]) -> float:
    """FLOPs of a grouped product of `experts/grouped.py`, rows by matrices, or rows by rows for their gradient."""
    ranks = [len(one.dims) for one in shapes], len(result.dims)
    if ranks == ([2, 3], 2):
        return 2.0 * shapes[0].elements * result.dims[-1]
    return 2.0 * shapes[0].elements * shapes[1].dims[-1] if ranks == ([2, 2], 3) else 0.0


def _ways(instruction: Instruction) -> int:
    """How many ways the groups are split whose rows a grouped product's kernel is given."""
    found = NAMED.search(instruction.rest)
    return int(found[1]) if found else 1


def _library_flops(computation: Computation, instruction: Instruction) -> tuple[str, float]:
    """FLOPs of calls into cuBLAS and cuDNN, of grouped products, and of the products in a TPU's kernels of attention.

    A fused attention kernel, or a Pallas kernel, states its own (in libtpu's text: twice the products' size).
    """
    target = instruction.target
    shapes = _shapes(computation, instruction)
    if target == _MOSAIC and len(shapes) > 1:
        if instruction.op_name == "online-softmax":
            return _wider(shapes), 2.0 * instruction.shapes[0].elements * shapes[0].dims[-1]
        said = _FLOPS.search(instruction.rest)
        return _wider(shapes), float(said[1]) / _ways(instruction) if said else 0.0
    if target.startswith(("__cublas$", "__onednn$matmul")) and len(shapes) > 1:
        match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)
        dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else [len(shapes[0].dims) - 1]
        return _wider(shapes), 2.0 * instruction.shapes[0].elements * math.prod(shapes[0].dims[dim] for dim in dims)
    matrices = [one for one in shapes if len(one.dims) > 1]
    if target == _TRITON and matrices:
        return _wider(matrices), _grouped_flops(instruction.shapes[0], matrices) / _ways(instruction)
    if target.startswith(_FUSED_ATTENTION):
        return _wider(shapes), fused_attention(instruction, shapes).flops
    if target.startswith("__cudnn$conv") and len(shapes) > 1:
        # dim_labels are the forward convolution's; which of its arrays the operands and the result are, differs.
        result = instruction.shapes[0]
        if "BackwardInput" in target:
            return _convolution_flops(instruction, [result, shapes[1]], shapes[0])
        if "BackwardFilter" in target:
            return _convolution_flops(instruction, [shapes[0], result], shapes[1])
        return _convolution_flops(instruction, shapes[:2], result)
    return "f32", 0.0
