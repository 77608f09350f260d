"""What of a plan shows at the borders of modules: their inputs, outputs, and the parameters that they read.

Lowerings that only see modules (DTensor's hooks, a `parallelize_plan`) can place these values and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autoshard.mesh import Spec
from autoshard.plans.value import ActivationPlan, Plan, Producer


@dataclass(frozen=True)
class BorderValue:
    """A value that enters or leaves a module; dtype in StableHLO's words."""

    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True)
class ModuleValues:
    """The values at the borders of a plan's modules, in its forward pass.

    Attributes:
        inputs, outputs: module path -> the values, in the order in which they are made; `""` is the whole model.
        reads: parameter or buffer -> how the forward pass reads it, where that is not how it is kept.
        inside: module path -> how many values inside it the plan places (its border does not show them).
        copies_inside: module path -> how many copies are read where no border is.
        backward: how many values of the backward pass and the optimizer the plan places.
    """

    inputs: Mapping[str, tuple[BorderValue, ...]]
    outputs: Mapping[str, tuple[BorderValue, ...]]
    reads: Mapping[str, Spec]
    inside: Mapping[str, int] = field(default_factory=dict)
    copies_inside: Mapping[str, int] = field(default_factory=dict)
    backward: int = 0


def forward_ops(plan: Plan) -> int:
    """How many of the program's ops are the forward pass and the loss.

    `loss.backward()` begins with ones like the loss, a number: that op is where the backward pass begins.
    """
    ops = plan.program.ops
    if plan.program.kind == "forward":
        return len(ops)
    for index in range(len(ops) - 1, -1, -1):
        if ops[index].name == "aten.ones_like.default" and ops[index].outputs[0].endswith("[]"):
            return index
    return len(ops)


def module_values(plan: Plan) -> ModuleValues:
    """Where the plan's values stand at the borders of modules."""
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
        """The module of each op of the forward pass; one that the plan says nothing of is where its operand is."""
        known = {index: each.module for (index, _), each in self.placed.items()}
        modules: list[str] = []
        for index in range(self.end):
            made = [p for p in self.ops[index].inputs if isinstance(p, tuple) and p[0] < index]
            modules.append(known.get(index, modules[made[0][0]] if made else ""))
        return modules

    def root(self, producer: Producer) -> Producer:
        """The value that the plan places, seen through ops that pass one on as it is."""
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
        """The modules that a value leaves: an op outside reads it, or nobody in the forward pass does."""
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
    """A module's path with `*` for the numbers of layers, as transformers writes it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _ancestors(module: str) -> Iterator[str]:
    """The module itself, and those it is in, without the whole model."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _within(module: str, outer: str) -> bool:
    return outer == "" or module == outer or module.startswith(f"{outer}.")
