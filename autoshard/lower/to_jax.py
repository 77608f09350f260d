"""Runs a plan in jax: on GPUs, TPUs, or virtual CPU devices.

    shardings = plan.to_jax()                      # NamedShardings by name, for code written in jax
    step = plan.to_jax().step(program, optimizer)  # the captured PyTorch step as a jax function
    state = step.place(model, optimizer)           # parameters, buffers, optimizer state: sharded jax arrays
    for batch in loader:
        state, outputs = step(state, batch)        # one step; donates the state
    step.restore(state, model, optimizer)          # back into PyTorch

The step is the captured StableHLO module with the plan's annotations, called through `jax.export`: its results are
those of the PyTorch program. Arguments are sharded as planned; pins and copies are sharding constraints inside.

**Uneven dims.** jax splits an argument only where the size of a dim is a multiple of the devices. Such an argument is
padded with zeros to the next multiple, and sliced inside the step, where the partitioner also splits unevenly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autoshard.cost.machine.device import scheduler_options
from autoshard.dtypes import is_float, numpy_dtype
from autoshard.errors import LoweringError
from autoshard.graph.ops import Graph
from autoshard.lower.arrays import to_numpy, to_torch
from autoshard.lower.devices import device_ids
from autoshard.lower.seeds import Seeds
from autoshard.mesh import Mesh, Spec
from autoshard.plans.annotated import annotations_of
from autoshard.plans.check import planned_for
from autoshard.plans.value import ROLES, ActivationKey, Plan
from autoshard.program import Argument, Program
from autoshard.regions.kernel import Platform
from autoshard.stablehlo.annotate import annotate, check_steps
from autoshard.stablehlo.context import mlir_context, ops_inside
from autoshard.stablehlo.reader import build_graph, parse_module
from autoshard.strategies.guard import check_compiles, warn_of_wrong_sums

if TYPE_CHECKING:
    from autoshard.lower.host_scalars import HostScalars

Partitioner = Literal["shardy", "gspmd"]
Precision = Literal["default", "highest"]
_PRODUCTS = frozenset({"stablehlo.dot", "stablehlo.dot_general", "stablehlo.convolution"})


@dataclass(frozen=True)
class JaxShardings:
    """A plan as a `jax.sharding.NamedSharding` for every tensor.

    Attributes:
        plan: its source.
        mesh: a `jax.sharding.Mesh` with the plan's axes, devices in the layout that the cost model assumes.
        parameters, buffers, inputs, optimizer_state, outputs: name -> NamedSharding.
        activations: of pinned values inside the program, for `jax.lax.with_sharding_constraint`.
        uneven: names of the arguments with a dim that does not divide into equal shards. jax refuses to split such an
            argument; pad it (`JaxStep` does), or do not split that dim.
    """

    plan: Plan = field(repr=False)
    mesh: Any
    parameters: Mapping[str, Any] = field(repr=False)
    buffers: Mapping[str, Any] = field(repr=False)
    inputs: Mapping[str, Any] = field(repr=False)
    optimizer_state: Mapping[str, Any] = field(repr=False)
    outputs: Mapping[str, Any] = field(repr=False)
    activations: Mapping[ActivationKey, Any] = field(repr=False)
    uneven: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Name -> NamedSharding of parameters, buffers, inputs and optimizer state together."""
        return {name: each for section in ROLES.values() for name, each in getattr(self, section).items()}

    def step(
        self,
        program: Program,
        optimizer: Any = None,
        *,
        partitioner: Partitioner = "shardy",
        precision: Precision = "default",
        seed: int = 0,
    ) -> JaxStep:
        """The planned program as a jax function; see `JaxStep`.

        Args:
            program: result of `autoshard.capture` (or read from a StableHLO file).
            optimizer: the torch optimizer over the model's parameters, where the program is a training step with one.
            partitioner: `shardy`, jax's default, or `gspmd`, for which plans are predicted.
            precision: of products of f32 values: the device's `default` (TF32 on GPUs since A100, bf16 on TPU), or
                `highest`, f32 as in PyTorch on a CPU.
            seed: of the program's random numbers, which differ in each step.

        Raises:
            PlanMismatchError: the program is not the planned one.
            LoweringError: an optimizer is missing, or its host scalars cannot be reproduced.
        """
        return JaxStep(self, program, optimizer, partitioner, precision, seed)


def _warn_of_reads(program: Program) -> None:
    """Warn of values that were read during capture: they are constants of the program."""
    if program.reads:
        first = program.reads[0]
        more = f", and {len(program.reads) - 1} more" if len(program.reads) > 1 else ""
        warnings.warn(
            f"the step reads values while it runs: {first.module or 'the model'} read {first.value} ({first.op})"
            f"{more}. In jax these stay what they were at capture: capture the program again where they change",
            stacklevel=4,
        )


def to_jax(plan: Plan, devices: Sequence[Any] | None = None) -> JaxShardings:
    """The plan's shardings on jax's devices, all of them unless given.

    Raises:
        LoweringError: there are not as many devices as the plan's mesh has.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax_mesh(plan.mesh, devices)

    def named(spec: Spec) -> Any:
        return NamedSharding(mesh, PartitionSpec(*(partition(plan.mesh, spec))))

    sections = {
        section: {name: named(tensor.spec) for name, tensor in getattr(plan, section).items()}
        for section in (*ROLES.values(), "outputs")
    }
    activations = {each.key: named(each.spec) for each in plan.activations if each.spec is not None}
    arguments = [item for section in ROLES.values() for item in getattr(plan, section).items()]
    uneven = tuple(name for name, each in arguments if padded(plan.mesh, each.shape, each.spec) != each.shape)
    return JaxShardings(plan, mesh, **sections, activations=activations, uneven=uneven)


def jax_mesh(mesh: Mesh, devices: Sequence[Any] | None = None) -> Any:
    """The `jax.sharding.Mesh` of a mesh, devices in the layout that the cost model assumes.

    Raises:
        LoweringError: the wrong number of devices.
    """
    import jax

    found = list(jax.devices() if devices is None else devices)
    if len(found) != mesh.size:
        shape = "x".join(map(str, mesh.shape))
        kind = found[0].platform if found else "jax"
        hint = ""
        if kind == "cpu":
            hint = (
                f"; for a trial run set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} before jax starts"
            )
        elif len(found) > mesh.size:
            hint = f"; pass which {mesh.size} of them to use"
        raise LoweringError(f"the plan's mesh {shape} has {mesh.size} devices, jax has {len(found)} ({kind}){hint}")
    attributes = [_attributes(number, device) for number, device in enumerate(found)]
    order = device_ids(mesh, attributes)
    return jax.sharding.Mesh(np.array([found[i] for i in order]).reshape(mesh.shape), mesh.axis_names)


def _attributes(number: int, device: Any) -> dict[str, Any]:
    """Attributes of a jax device in torch_xla's form."""
    found: dict[str, Any] = {"name": f"{device.platform}:{number}"}
    if getattr(device, "coords", None) is not None:
        found["coords"] = device.coords
        found["core_on_chip"] = getattr(device, "core_on_chip", 0)
        found["slice_index"] = getattr(device, "slice_index", 0)
    return found


def partition(mesh: Mesh, spec: Spec) -> tuple[str | tuple[str, ...] | None, ...]:
    """A spec as a `PartitionSpec`; axes of one device drop out."""
    dims = [tuple(axis for axis in dim if mesh.axis_size(axis) > 1) for dim in spec]
    return tuple(None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims)


def padded(mesh: Mesh, shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
    """The least shape that holds `shape` and divides into equal shards."""
    return tuple(-(-size // ways) * ways for size, ways in zip(shape, map(mesh.ways, spec), strict=True))


class JaxStep:
    """A captured PyTorch program as a jax function, partitioned as planned.

    Attributes:
        shardings: of its arguments and results.
        program: the captured one.
        jitted: the jitted function of all arguments (name -> array; those of the state are donated); `step.lower()`
            lowers it.
    """

    def __init__(
        self,
        shardings: JaxShardings,
        program: Program,
        optimizer: Any,
        partitioner: Partitioner,
        precision: Precision,
        seed: int,
    ) -> None:
        """Annotate the program's module and make it callable; nothing is compiled yet."""
        import jax

        if partitioner not in ("shardy", "gspmd"):
            raise ValueError(f"partitioner {partitioner!r}: jax has shardy and gspmd")
        if precision not in ("default", "highest"):
            raise ValueError(f"precision {precision!r}: default or highest")
        plan = planned_for(shardings.plan, program)
        if plan.micro_batches > 1:
            raise LoweringError(
                f"the plan is of {plan.micro_batches} micro-batches, and jax would run two of them: plan one, and add "
                "up the gradients of its function; through torch_xla and DTensor an ordinary loop runs it"
            )
        check_steps(program)
        _warn_of_reads(program)
        graph = build_graph(program)
        if plan.solver is None:
            check_compiles(graph, annotations_of(plan, graph), plan.mesh)
            warn_of_wrong_sums(graph, annotations_of(plan, graph), plan.mesh)
        self.shardings, self.program, self.partitioner = shardings, program, partitioner
        self._mesh = plan.mesh
        kind = shardings.mesh.devices.flat[0].platform
        platforms: dict[str, Platform] = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}
        platform = platforms.get(kind, "cpu")  # written out, such as for ROCm
        self._on_gpu = kind not in ("cpu", "tpu")
        module = annotate(program, graph, annotations_of(plan, graph), plan.mesh, partitioner, platform=platform)
        self._call = _exported_call(module, program, plan.mesh.size, precision)
        self._types = {argument.name: argument.type for argument in program.arguments}
        specs = {argument.name: plan.argument(argument) for argument in program.arguments}
        self._specs = {name: tensor for name, tensor in specs.items() if tensor is not None}
        updated = {program.arguments[o.updates].name for o in program.outputs if o.updates is not None}
        own = [name for name in self._types if name not in program.values and name not in updated]
        taken = {name: place for place, name in enumerate(program.inputs)}
        inputs = [name for name in own if name in plan.inputs or name not in self._specs]
        self._inputs = sorted(inputs, key=lambda name: taken.get(name, len(taken)))
        self._state = [name for name in self._types if name not in program.values and name not in self._inputs]
        none = jax.sharding.NamedSharding(shardings.mesh, jax.sharding.PartitionSpec())
        self._shardings = dict.fromkeys((*self._state, *self._inputs), none) | shardings.arguments()
        self._seeds = Seeds(graph, seed)
        self._followed = self._host_scalars(graph, optimizer)
        self.jitted = self._jitted()

    def _host_scalars(self, graph: Graph, optimizer: Any) -> HostScalars:
        """The source of the scalars of each step."""
        varying = optimizer_scalars(graph)
        if varying and optimizer is None:
            raise LoweringError(
                "the program is a training step whose optimizer works on the host too (step sizes, bias corrections): "
                "pass the torch optimizer, step(program, optimizer)"
            )
        from autoshard.lower.host_scalars import HostScalars

        return HostScalars(self.program, optimizer, varying)

    def _whole(self, name: str) -> tuple[int, ...]:
        """The padded shape of an argument."""
        tensor = self._specs.get(name)
        return self._types[name].shape if tensor is None else padded(self._mesh, tensor.shape, tensor.spec)

    # The function.

    def _jitted(self) -> Any:
        import jax
        from jax import lax

        program = self.program
        shardings, outputs, whole = self._shardings, self.shardings.outputs, self._whole

        def step(state: dict[str, Any], others: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            given = {**state, **others}
            values = []
            for argument in program.arguments:
                value = given[argument.name]
                if value.shape != argument.type.shape:
                    value = lax.slice(value, (0,) * value.ndim, argument.type.shape)
                if argument.name in shardings:
                    value = lax.with_sharding_constraint(value, shardings[argument.name])
                values.append(value)
            results = self._call(*values)
            new, made = dict(state), {}
            for output, result in zip(program.outputs, results, strict=True):
                if output.updates is None:
                    if output.name in outputs:
                        result = lax.with_sharding_constraint(result, outputs[output.name])
                    made[output.name] = result
                    continue
                name = program.arguments[output.updates].name
                if name in state:
                    result = lax.with_sharding_constraint(result, shardings[name])
                    widths = [(0, have - size, 0) for have, size in zip(whole(name), result.shape, strict=True)]
                    new[name] = lax.pad(result, np.zeros((), result.dtype), widths)
            return new, made

        of_state = {name: shardings[name] for name in self._state}
        options = scheduler_options(self._mesh.device) if self._on_gpu else None
        specs = {"in_shardings": (of_state, None), "out_shardings": (of_state, None)}
        return jax.jit(step, donate_argnums=0, **specs, compiler_options=options)

    def __call__(self, state: Mapping[str, Any], inputs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step: the state after it, and the program's outputs (`loss`…) by name, as jax arrays.

        Args:
            state: result of `place` or of the step before; donated.
            inputs: torch tensors, arrays, or jax arrays: a mapping by name (`plan.inputs`, and scalars of a StableHLO
                file), a sequence in the order of the model's and the loss's (or the file's) parameters, or the only
                one.
        """
        with self._settings():
            return self.jitted(dict(state), {**self.place_inputs(inputs), **self._next_scalars()})  # type: ignore[no-any-return]

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the step, to compile ahead of time or inspect."""
        import jax

        def aval(argument: Argument) -> Any:
            sharding = self._shardings.get(argument.name)
            return jax.ShapeDtypeStruct(self._whole(argument.name), numpy_dtype(argument.type.dtype), sharding=sharding)

        with self._settings():
            avals = {argument.name: aval(argument) for argument in self.program.arguments}
            state = {name: avals.pop(name) for name in self._state}
            return self.jitted.lower(state, avals)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Enable 64-bit types, PyTorch's, and select the partitioner."""
        import jax
        from jax._src import config

        with jax.enable_x64(True), config.use_shardy_partitioner(self.partitioner == "shardy"):
            yield

    def _next_scalars(self) -> dict[str, Any]:
        return {name: to_numpy(value) for name, value in self._followed.next_step().items()} | self._seeds.next_step()

    # Between PyTorch and jax.

    def place(
        self, model: Any = None, optimizer: Any = None, *, tensors: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Parameters, buffers and optimizer state as jax arrays, each device holding its shard.

        Args:
            model: a PyTorch model with weights.
            optimizer: its optimizer; missing state is initialised as its first step would.
            tensors: arrays or tensors by name, in place of those of `model`.

        Raises:
            PlanMismatchError: the model or optimizer is not the planned one; LoweringError: it has no weights.
        """
        found: dict[str, Any] = dict(tensors or {})
        if model is not None:
            from autoshard.lower.torch_xla import place

            place.check_model(self.shardings.plan, model, optimizer)
            found.update({name: value.detach() for name, value in model.named_parameters()})
            found.update({name: value.detach() for name, value in model.named_buffers()})
            if optimizer is not None:
                found.update(self._begun(model, optimizer))
        missing = next((name for name in self._state if name not in found), None)
        if missing is not None:
            raise LoweringError(
                f"nothing was given for {missing}: place(model, optimizer), or tensors={{{missing!r}: …}}"
            )
        return {name: self._placed(name, found[name]) for name in self._state}

    def _begun(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state by name; missing state is initialised as its first step would."""
        from autoshard.lower.begin import create_state
        from autoshard.lower.torch_xla import place

        before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        create_state(optimizer, place.without_state(self.shardings.plan, model, optimizer))
        found = {name: value.detach() for name, _, _, value in place.states(model, optimizer)}
        optimizer.state.clear()
        optimizer.state.update(before)
        return found

    def place_inputs(self, inputs: Any) -> dict[str, Any]:
        """A batch as jax arrays, sharded as planned, by name."""
        wanted = self._inputs
        names = ", ".join(wanted)
        if not isinstance(inputs, Mapping):
            several = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
            if len(several) != len(wanted):
                raise LoweringError(f"the program has {len(wanted)} inputs ({names}), {len(several)} were given")
            inputs = dict(zip(wanted, several, strict=True))
        unknown = next((name for name in inputs if name not in wanted), None)
        if unknown is not None:
            raise LoweringError(f"the program has no input {unknown}; it has {names}")
        missing = next((name for name in wanted if name not in inputs), None)
        if missing is not None:
            raise LoweringError(f"input {missing} was not given; the program has {names}")
        return {name: self._placed(name, value) for name, value in inputs.items()}

    def _placed(self, name: str, value: Any) -> Any:
        import jax

        kind, sharding, whole = self._types[name], self._shardings[name], self._whole(name)
        if isinstance(value, jax.Array) and value.shape == whole:
            return value if value.sharding == sharding else jax.device_put(value, sharding)
        array = to_numpy(value)
        dtype = numpy_dtype(kind.dtype)
        if array.shape != kind.shape or array.dtype != dtype:
            given = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            raise LoweringError(f"{name} is {given}, planned was {kind.dtype}[{','.join(map(str, kind.shape))}]")
        if whole != kind.shape:
            array = np.pad(array, [(0, have - size) for have, size in zip(whole, kind.shape, strict=True)])
        with jax.enable_x64(True):  # copies: jax's CPU devices take aligned memory of the host as their own
            return jax.make_array_from_callback(whole, sharding, lambda index: array[index].copy())

    def fetch(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state as full numpy arrays, without padding."""
        return {
            name: np.asarray(state[name])[tuple(slice(size) for size in self._specs[name].shape)]
            for name in self._state
        }

    def restore(self, state: Mapping[str, Any], model: Any, optimizer: Any = None) -> None:
        """Write a state back into a PyTorch model and its optimizer, counters included, in place."""
        import torch

        from autoshard.frontends.tracing.optimizer import put
        from autoshard.lower.begin import create_state
        from autoshard.lower.torch_xla import place

        found = {name: to_torch(array) for name, array in self.fetch(state).items()}
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in found:
                    tensor.copy_(found[name])
            if optimizer is None:
                return
            create_state(optimizer, place.without_state(self.shardings.plan, model, optimizer))
            self._followed.restore(optimizer)
            for name, parameter, path, _ in list(place.states(model, optimizer)):
                if name in self.shardings.plan.optimizer_state:
                    put(optimizer.state[parameter], path, found[name].clone())


def optimizer_scalars(graph: Graph) -> list[str]:
    """Names of the scalars that may differ between steps: floating, without dims, read or returned by the optimizer."""
    program = graph.program
    returned = zip(graph.outputs, program.outputs, strict=True)
    read = {value.op for value, output in returned if output.role in ("parameter", "optimizer_state")} | {
        operand.op
        for op in graph.ops
        if op.aten is not None and op.aten < len(program.ops) and program.ops[op.aten].phase == "optimizer"
        for operand in op.operands
    }
    return [
        argument.name
        for op, argument in zip(graph.arguments, program.arguments, strict=True)
        if argument.role == "scalar" and op in read and not argument.type.shape and is_float(argument.type.dtype)
    ]


def _exported_call(module: bytes, program: Program, devices: int, precision: Precision) -> Callable[..., Sequence[Any]]:
    """The module as a function of jax arrays, in the order of its arguments."""
    import jax
    from jax import export
    from jax._src import core
    from jax._src.lib import _jax
    from jax._src.lib.mlir.dialects import hlo

    with mlir_context():
        parsed = parse_module(module)
        if precision == "highest":
            _set_highest(parsed.operation)
        version = hlo.get_version_from_compatibility_requirement(hlo.StablehloCompatibilityRequirement.WEEK_4)
        serialized = _jax.mlir.serialize_portable_artifact(parsed, version, True)
    with jax.enable_x64(True):
        taken = tuple(core.ShapedArray(each.type.shape, numpy_dtype(each.type.dtype)) for each in program.arguments)
        given = tuple(core.ShapedArray(each.type.shape, numpy_dtype(each.type.dtype)) for each in program.outputs)
    none = (None,) * len(taken)
    exported = export.Exported(
        fun_name="autoshard_step",
        in_tree=jax.tree.structure((tuple(taken), {})),
        in_avals=taken,
        out_tree=jax.tree.structure(tuple(given)),
        out_avals=given,
        _has_named_shardings=False,
        _in_named_shardings=none,
        _out_named_shardings=(None,) * len(given),
        in_shardings_hlo=none,
        out_shardings_hlo=(None,) * len(given),
        nr_devices=devices,
        platforms=("cpu",),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(export.DisabledSafetyCheck.platform(),),
        mlir_module_serialized=serialized,
        calling_convention_version=export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(taken))),
        uses_global_constants=False,
        _get_vjp=None,
    )
    return exported.call  # type: ignore[no-any-return]


def _set_highest(op: Any) -> None:
    """Set every product in an op's regions to the precision of its operands."""
    from jaxlib.mlir import ir

    highest = ir.Attribute.parse("#stablehlo<precision HIGHEST>")
    for inner in ops_inside(op):
        if inner.name in _PRODUCTS:
            inner.attributes["precision_config"] = ir.ArrayAttr.get([highest, highest])
