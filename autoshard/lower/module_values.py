"""The values of a plan at module boundaries: inputs, outputs, and parameters read.

Lowerings that only see modules (DTensor's hooks, a `parallelize_plan`) can shard these values and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autoshard.mesh import Spec
from autoshard.plans.value import ActivationPlan, Plan, Producer


@dataclass(frozen=True)
class BorderValue:
    """A value that enters or leaves a module; dtype in StableHLO's spelling."""

    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True)
class ModuleValues:
    """The values at the boundaries of a plan's modules, in its forward pass.

    Attributes:
        inputs, outputs: module path -> its values in program order; `""` is the whole model.
        reads: parameter or buffer -> spec under which the forward pass reads it, where that is not its own.
        inside: module path -> number of planned values inside it, not at its boundary.
        copies_inside: module path -> number of copies read away from a boundary.
        backward: number of planned values of the backward pass and the optimizer.
    """

    inputs: Mapping[str, tuple[BorderValue, ...]]
    outputs: Mapping[str, tuple[BorderValue, ...]]
    reads: Mapping[str, Spec]
    inside: Mapping[str, int] = field(default_factory=dict)
    copies_inside: Mapping[str, int] = field(default_factory=dict)
    backward: int = 0


def forward_ops(plan: Plan) -> int:
    """Number of the program's ops in the forward pass and the loss.

    `loss.backward()` begins with an op that makes ones like the loss, a scalar: there the backward pass begins.
    """
    ops = plan.program.ops
    if plan.program.kind == "forward":
        return len(ops)
    for index in range(len(ops) - 1, -1, -1):
        if ops[index].name == "aten.ones_like.default" and ops[index].outputs[0].endswith("[]"):
            return index
    return len(ops)


def module_values(plan: Plan) -> ModuleValues:
    """Find the plan's values at module boundaries."""
    return _Reader(plan).read()


class _Reader:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ops = plan.program.ops
        self.end = forward_ops(plan)
        self.placed = {(each.key.index, each.key.output): each for each in plan.activations}
        self.modules = self.op_modules()
        self.readers: dict[Producer, list[int]] = {}
        for index in range(self.end):
            for producer in self.ops[index].inputs:
                self.readers.setdefault(self.root(producer), []).append(index)

    def op_modules(self) -> list[str]:
        """The module of each op of the forward pass; one that the plan lacks is in its operand's module."""
        known = {index: each.module for (index, _), each in self.placed.items()}
        modules: list[str] = []
        for index in range(self.end):
            made = [p for p in self.ops[index].inputs if isinstance(p, tuple) and p[0] < index]
            modules.append(known.get(index, modules[made[0][0]] if made else ""))
        return modules

    def root(self, producer: Producer) -> Producer:
        """The planned value behind ops that pass it on unchanged."""
        while isinstance(producer, tuple) and producer not in self.placed:
            op = self.ops[producer[0]]
            before = op.inputs[0] if len(op.inputs) == 1 else None
            if before is None or (isinstance(before, tuple) and self.ops[before[0]].outputs != op.outputs):
                return producer
            producer = before
        return producer

    def read(self) -> ModuleValues:
        inputs: dict[str, list[BorderValue]] = {}
        outputs: dict[str, list[BorderValue]] = {}
        inside: dict[str, int] = {}
        copies_inside: dict[str, int] = {}
        for (index, output), value in sorted(self.placed.items()):
            if index >= self.end:
                continue
            if value.spec is not None:
                shown = list(self.leaves(value, (index, output)))
                for module in shown:
                    outputs.setdefault(module, []).append(BorderValue(value.shape, value.dtype, value.spec))
                if not shown:
                    inside[value.module] = inside.get(value.module, 0) + 1
            for copy in value.copies:
                if copy.consumer >= self.end:
                    continue
                module = self.modules[copy.consumer]
                if _within(value.module, module):
                    copies_inside[module] = copies_inside.get(module, 0) + 1
                else:
                    inputs.setdefault(module, []).append(BorderValue(value.shape, value.dtype, copy.spec))
        for name, tensor in self.plan.inputs.items():
            for copy in tensor.copies:
                if copy.consumer < self.end and self.modules[copy.consumer]:
                    module = self.modules[copy.consumer]
                    inputs.setdefault(module, []).append(BorderValue(tensor.shape, tensor.dtype, copy.spec))
                elif copy.consumer < self.end:
                    copies_inside[""] = copies_inside.get("", 0) + 1
            del name
        return ModuleValues(
            inputs={module: tuple(dict.fromkeys(values)) for module, values in inputs.items()},
            outputs={module: tuple(dict.fromkeys(values)) for module, values in outputs.items()},
            reads=self.reads(),
            inside=inside,
            copies_inside=copies_inside,
            backward=sum(index >= self.end for index, _ in self.placed),
        )

    def leaves(self, value: ActivationPlan, producer: Producer) -> Iterator[str]:
        """The modules that a value leaves: an op outside reads it, or none in the forward pass does."""
        readers = self.readers.get(producer, [])
        for module in _ancestors(value.module):
            if not readers or any(not _within(self.modules[reader], module) for reader in readers):
                yield module

    def reads(self) -> dict[str, Spec]:
        found = {}
        for section in (self.plan.parameters, self.plan.buffers):
            for name, tensor in section.items():
                specs = [copy.spec for copy in tensor.copies if copy.consumer < self.end]
                if specs:
                    found[name] = specs[0]
        return found


def starred(path: str) -> str:
    """A module's path with `*` for layer numbers, as in transformers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _ancestors(module: str) -> Iterator[str]:
    """The module itself and its ancestors, without the whole model."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _within(module: str, outer: str) -> bool:
    return outer == "" or module == outer or module.startswith(f"{outer}.")
