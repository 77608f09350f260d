"""Runs a captured StableHLO module on jax's CPU devices, step after step.

    step = CapturedStep(program, optimizer)       # the module as captured, on one device
    state = step.begin(model, optimizer)          # parameters, buffers and optimizer state by name
    state, outputs = step(state, {"input": x})    # the state after one step, and the loss

With a plan it runs the module that `autoshard lower` writes, on the plan's number of devices. Neither torch_xla nor
`jax.export` is involved, so a difference from PyTorch is one of the captured program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from autoshard.dtypes import numpy_dtype
from autoshard.errors import LoweringError
from autoshard.frontends.tracing.inputs import key_name
from autoshard.lower.arrays import to_numpy
from autoshard.lower.host_scalars import HostScalars
from autoshard.lower.to_jax import optimizer_scalars, padded, to_jax
from autoshard.mesh import Spec
from autoshard.plans.annotated import annotations_of
from autoshard.plans.value import Plan
from autoshard.program import Program, TensorType
from autoshard.stablehlo.annotate import annotate, check_steps, whole
from autoshard.stablehlo.context import mlir_context
from autoshard.stablehlo.reader import build_graph, parse_module

if TYPE_CHECKING:
    import torch


Kind = Literal["parameter", "buffer", "optimizer_state"]
Arrays = Mapping[str, "np.ndarray[Any, Any]"]


class CapturedStep:
    """A captured program as a function of numpy arrays.

    Args:
        program: what `autoshard.capture` made.
        optimizer: over the model's parameters, where the program is a training step with one; it gives the scalars
            computed on the host in each step, counted from the steps in its state.
        plan: whose annotations the module gets; without one it runs on one device.
    """

    def __init__(
        self, program: Program, optimizer: torch.optim.Optimizer | None = None, plan: Plan | None = None
    ) -> None:
        """Compile it."""
        import jax

        check_steps(program)
        self.program, self._plan = program, plan
        graph = build_graph(program)
        devices = jax.local_devices(backend="cpu")[:1]
        if plan is not None:
            self._jax = to_jax(plan, jax.local_devices(backend="cpu")[: plan.mesh.size])
            module = annotate(program, graph, annotations_of(plan, graph), plan.mesh, partitions=True, platform="cpu")
            devices = list(self._jax.mesh.devices.flatten())
        else:
            module = whole(program, graph)
        self._executable = _compiled(module, devices, len(program.outputs))
        self._device = jax.sharding.SingleDeviceSharding(devices[0])
        self._scalars = HostScalars(program, optimizer, optimizer_scalars(graph))

    def begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Arrays:
        """The arguments that a model and its optimizer hold; the optimizer has taken a step already.

        Raises:
            LoweringError: an argument of the program is none of them, and no input.
        """
        found = {name: tensor for (_, name), tensor in held_tensors(model, optimizer).items()}
        held = [each for each in self.program.arguments if each.role not in ("input", "scalar")]
        missing = next((each for each in held if each.name not in found), None)
        if missing is not None:
            raise LoweringError(f"the model and its optimizer hold no {missing.role} {missing.name}")
        return {each.name: to_numpy(found[each.name]).copy() for each in held}

    def __call__(self, state: Arrays, inputs: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        """One step: the state after it, and the results that replace no argument (`loss`…) by name."""
        import jax

        given = {**state, **inputs, **self._scalars.next_step()}
        with jax.enable_x64(True):
            results = self._executable.execute_sharded([self._placed(each, given) for each in self.program.arguments])
            shards = results.disassemble_into_single_device_arrays()
        after, made = dict(state), {}
        for output, parts in zip(self.program.outputs, shards, strict=True):
            if output.updates is None:
                made[output.name] = self._whole(output.type, self._split_result(output.name), parts)
            else:
                argument = self.program.arguments[output.updates]
                after[argument.name] = self._whole(argument.type, self._split(argument), parts)
        return after, made

    def _split(self, argument: Any) -> tuple[Spec, Any] | None:
        """How the plan splits an argument, as its spec and as jax's sharding; None where it is replicated."""
        tensor = None if self._plan is None else self._plan.argument(argument)
        return None if tensor is None else (tensor.spec, self._jax.arguments()[argument.name])

    def _split_result(self, name: str) -> tuple[Spec, Any] | None:
        """How a result that replaces no argument is split: spec and jax sharding; None where replicated."""
        tensor = None if self._plan is None else self._plan.outputs.get(name)
        return None if tensor is None else (tensor.spec, self._jax.outputs[name])

    def _placed(self, argument: Any, given: Mapping[str, Any]) -> Any:
        import jax

        array = to_numpy(given[argument.name])
        want = numpy_dtype(argument.type.dtype)
        if array.shape != argument.type.shape or array.dtype != want:
            has = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            raise LoweringError(f"{argument.name} is {has}, the program takes {argument.type}")
        split = self._split(argument)
        if split is None:
            return jax.device_put(array, self._replicated())
        assert self._plan is not None
        whole = padded(self._plan.mesh, array.shape, split[0])
        if whole != array.shape:
            array = np.pad(array, [(0, have - size) for have, size in zip(whole, array.shape, strict=True)])
        return jax.device_put(array, split[1])

    def _replicated(self) -> Any:
        import jax

        if self._plan is None:
            return self._device
        return jax.sharding.NamedSharding(self._jax.mesh, jax.sharding.PartitionSpec())

    def _whole(self, kind: TensorType, split: tuple[Spec, Any] | None, parts: list[Any]) -> np.ndarray[Any, Any]:
        """Assemble a result from its shards; one without an annotation is replicated."""
        import jax

        if split is None or parts[0].shape == kind.shape:
            return np.asarray(parts[0])
        assert self._plan is not None
        whole = padded(self._plan.mesh, kind.shape, split[0])
        array = jax.make_array_from_single_device_arrays(whole, split[1], parts)
        return np.asarray(array)[tuple(slice(size) for size in kind.shape)]


def held_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[tuple[Kind, str], Tensor]:
    """(Kind, name) -> present value of each tensor that a training step may update, named as in a `Program`."""
    found: dict[tuple[Kind, str], Tensor] = {}
    for name, parameter in model.named_parameters():
        found["parameter", name] = parameter.detach()
        state = dict(optimizer.state.get(parameter, {})) if optimizer is not None else {}
        for path, value in tree_flatten_with_path(state)[0]:
            if isinstance(value, Tensor):
                found["optimizer_state", ".".join((name, *map(key_name, path)))] = value.detach()
    for name, buffer in model.named_buffers():
        found["buffer", name] = buffer.detach()
    return found


def _compiled(module: bytes, devices: list[Any], results: int) -> Any:
    """Compile a module quickly for these CPU devices; results without an annotation are replicated."""
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc

    options = xc.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = 1
    options.num_partitions = build.num_partitions = len(devices)
    build.use_spmd_partitioning = len(devices) > 1
    build.use_shardy_partitioner = False  # the annotations are GSPMD's
    build.allow_spmd_sharding_propagation_to_output = [False] * results
    build.debug_options.xla_backend_optimization_level = 0
    build.debug_options.xla_llvm_disable_expensive_passes = True
    options.device_assignment = xc.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    with mlir_context():
        parsed = parse_module(module)
        return devices[0].client.compile_and_load(parsed, _jax.DeviceList(tuple(devices)), options)
