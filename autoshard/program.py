"""A captured program: a StableHLO module, and the PyTorch origin of each of its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from autoshard.dtypes import is_float

ArgumentRole = Literal["parameter", "buffer", "input", "optimizer_state", "scalar"]
OutputRole = Literal["loss", "output", "parameter", "buffer", "optimizer_state"]

PYTORCH = frozenset({"torch_xla", "torchax"})
"""Frontends whose programs are sequences of aten ops; of one program both give the same, see docs/capture.md."""


PYTORCH = frozenset({"torch_xla", "torchax"})
"""Frontends whose programs are sequences of aten ops; of one program both give the same, see docs/capture.md."""


@dataclass(frozen=True)
class TensorType:
    """Shape and element type of a tensor; dtype in StableHLO's spelling (`f32`, `bf16`, `i64`, `i1`)."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """`f32[8,512,768]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Argument:
    """One argument of the module's main function, in its order.

    Attributes:
        name: `transformer.wte.weight`, `input_ids`, `transformer.wte.weight.exp_avg`, or `scalar3`.
        role: its role in the training step.
        of: for optimizer state, the parameter it belongs to.
    """

    name: str
    role: ArgumentRole
    type: TensorType
    of: str | None = None


@dataclass(frozen=True)
class Output:
    """One result of the module's main function, in its order.

    Attributes:
        updates: index of the argument that this result replaces in the next step (donated, of the same sharding), or
            None.
    """

    name: str
    role: OutputRole
    type: TensorType
    updates: int | None = None


@dataclass(frozen=True)
class AtenOp:
    """One operation that torch dispatched, in dispatch order.

    Attributes:
        index: k, its position in the sequence; HLO ops carry the location `op<k>`.
        name: such as `aten.addmm.default`.
        module: path of the module that ran it (backward: that whose forward it differentiates), `""` where unknown.
        phase: `forward`, `backward` or `optimizer`.
        outputs: its tensor results, in order.
        inputs: the producer of each tensor it reads: `(k, j)` for output j of op k, the name of an argument, or None
            for a host constant (see `frontends.tracing.sequence`).
        options: other arguments, such as `dim=1, keepdim=True`: integers, bools and strings that are not defaults. Not
            floats: a training loop may change them from step to step.
    """

    index: int
    name: str
    module: str
    phase: str
    outputs: tuple[TensorType, ...]
    inputs: tuple[tuple[int, int] | str | None, ...] = ()
    options: str = ""


@dataclass(frozen=True)
class ValueRead:
    """A value that the step read on the host during capture (`.item()`, `if t:`, `nonzero()`).

    Attributes:
        before: the index of the next aten op.
        op: the op that read it, such as `aten._local_scalar_dense.default`.
        module: path of the module, `""` where unknown.
        value: a short description (`known.described`).
        follows_from: what it depends on: roles of arguments; integer inputs are `input`, others `floats`.
    """

    before: int
    op: str
    module: str
    value: str
    follows_from: tuple[str, ...]


@dataclass(frozen=True)
class MicroSteps:
    """A step of `count` micro-batches, captured as two micro-steps and the update.

    Attributes:
        count: micro-batches of a step, at least 2.
        second: the first aten op of the second micro-step, which stands for all after the first.
        update: the op after its last.
        carried: (before, after) of each gradient and buffer that the second micro-step changes: producers of its value
            when that begins and when it ends, which is where the next begins.
    """

    count: int
    second: int
    update: int
    carried: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()

    def runs(self, op: int | None) -> int:
        """How often an aten op runs in a step."""
        return self.count - 1 if op is not None and self.second <= op < self.update else 1


def of_micro_step(name: str, number: int) -> str:
    """The name of an input or loss of micro-step `number`, from 1: `x`, `x@2`."""
    return name if number == 1 else f"{name}@{number}"


WRITTEN_LAST = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "addcmul.default", "addcdiv.default", "lerp.Scalar",
        "neg.default", "sqrt.default", "rsqrt.default", "exp.default", "tanh.default", "tanh_backward.default",
    )
)  # fmt: skip
"""Aten ops that torch_xla lowers to elementwise ops, the last of which makes the one output.

They need no marker, which saves a fifth of the ops of an optimizer's step.
"""


@dataclass(frozen=True)
class Program:
    """A PyTorch program as StableHLO; made by `autoshard.capture`.

    Attributes:
        kind: `forward`, or `train` for forward, loss, backward and optimizer step.
        frontend: `torch_xla`, `torchax`, or `stablehlo` for a file, whose StableHLO ops stand for aten ops.
        versions: package name -> version that captured it.
        switches: the capture switches used, by name, in order; lowering needs the same.
        stablehlo: the module, MLIR bytecode. The location of an op names its aten op (`op<k>`); a value that is
            output j of aten op k goes through `custom_call @Sharding` with the location `op<k>.out<j>`, but for
            ops that are `unmarked`.
        arguments, outputs: of the module's main function.
        ops: the aten ops in dispatch order.
        values: name of a scalar (or another constant of the host) -> its value at capture, a CPU tensor. An optimizer's
            host scalars, such as bias corrections, differ in every step.
        annotated: name of an argument -> the GSPMD sharding on its tensor at capture, as HLO text.
        tp_plan: the model's own tensor parallel plan, as in transformers: path of a module or parameter, with `*` for
            numbers, -> style; empty where it has none.
        reads: the values that the step read on the host, in order, except those equal in every step. Other values may
            mean another program: lowering checks them.
        inputs: names of the arguments that are inputs, in the order in which the model and then the loss take them.
        written_out: (switch, module, reason) of each attention, or mixture's experts, that could have been kept as one
            op, and why it was not.
        once: why the next step is another program (forward reads an attribute that it set, say); empty where it is the
            same. A running step (`plan.annotate()`) is traced each time, so is right anyway.
        micro_steps: of a step of several micro-batches.
    """

    kind: Literal["forward", "train"]
    frontend: str
    versions: dict[str, str]
    switches: tuple[str, ...]
    stablehlo: bytes = field(repr=False)
    arguments: tuple[Argument, ...] = field(repr=False)
    outputs: tuple[Output, ...] = field(repr=False)
    ops: tuple[AtenOp, ...] = field(repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    annotated: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    tp_plan: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    reads: tuple[ValueRead, ...] = field(default=(), repr=False, compare=False)
    inputs: tuple[str, ...] = field(default=(), repr=False, compare=False)
    written_out: tuple[tuple[str, str, str], ...] = field(default=(), repr=False, compare=False)
    once: str = field(default="", repr=False, compare=False)
    micro_steps: MicroSteps | None = None

    def runs(self, op: int | None) -> int:
        """How often an aten op runs in a step."""
        return 1 if self.micro_steps is None else self.micro_steps.runs(op)

    @cached_property
    def unmarked(self) -> frozenset[int]:
        """Aten ops whose output needs no marker: it is the last op with their label, constants aside."""
        if self.frontend != "torch_xla":
            return frozenset()
        plain = (op for op in self.ops if op.name in WRITTEN_LAST)
        return frozenset(op.index for op in plain if any(is_float(kind.dtype) for kind in op.outputs))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the aten sequence, arguments, outputs and switches: equal for equal programs on any machine."""
        digest = hashlib.sha256()
        for part in (self.kind, self.frontend, self.switches, self.arguments, self.outputs):
            digest.update(repr(part).encode())
        for op in self.ops:
            digest.update(repr((op.name, op.outputs, op.inputs, op.options)).encode())
        return digest.hexdigest()
