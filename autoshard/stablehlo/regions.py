"""Replaces attentions and experts kept as one op by manual regions, in which each device runs a kernel on its part.

How a region is split follows from annotations (`RegionDims.split`), and how it takes its operands from that, in GSPMD's
form between `SPMDFullToShardShape` and `SPMDShardToFullShape`, in Shardy's as an `sdy.manual_computation`. Partial
results are all-reduced in it, or reduce-scattered where they are annotated as split by those axes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from autoshard.fused import TARGETS, Signature, dims_of, form_class, kernel_of
from autoshard.mesh import Mesh, Spec
from autoshard.program import TensorType
from autoshard.regions.kernel import Kernel, Platform
from autoshard.stablehlo.context import bytecode, entry_block, functions_of, mlir_context


@dataclass(frozen=True)
class Region:
    """How an op is split over a mesh.

    Attributes:
        operands: the spec of each operand.
        results: the spec of each result.
        sums: per result the axes over which it is a partial sum.
        scattered: per result the dim along which that sum is reduce-scattered, or None.
        extras: the axes that split the kernel's own constants.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    sums: tuple[tuple[str, ...], ...]
    scattered: tuple[int | None, ...]
    extras: tuple[str, ...]

    @classmethod
    def of(cls, op: Signature, reads: Sequence[Spec], wanted: Sequence[Spec], mesh: Mesh) -> Region:
        """The region of an op whose operands and results are annotated so."""
        dims = dims_of(op.kind, op.form, [each.shape for each in op.operands])
        split = dims.split(reads, wanted, mesh.ways)
        made = [dims.made(number, split, spec) for number, spec in enumerate(wanted)]
        results, sums, scattered = zip(*made, strict=True)
        operands = tuple(dims.tiling(letters, split) for letters in dims.operands)
        return cls(operands, results, sums, scattered, split.get(dims.extras, ()))


def region_hlo(
    op: Signature, reads: Sequence[Spec], wanted: Sequence[Spec], mesh: Mesh, platform: Platform,
    devices: Sequence[int], channel: int,
) -> bytes:  # fmt: skip
    """One op's region as a serialized HloModuleProto: operands to a tuple of results.

    Args:
        reads, wanted: specs of the operands and of the results.
        devices: the partition at each position of the mesh, row-major.
        channel: a number that no other region of the program has; those of its collectives follow from it.
    """
    from jaxlib import _jax
    from jaxlib.mlir import ir

    grid = np.asarray(devices, dtype=np.int64).reshape(mesh.shape)
    with mlir_context(), ir.Location.unknown():
        kinds = [str(_mlir(each.shape, each.dtype)) for each in op.operands]
        makes = ", ".join(str(_mlir(each.shape, each.dtype)) for each in op.results)
        names = [f"%a{i}" for i in range(len(kinds))]
        target = next(target for target, kind in TARGETS.items() if kind == op.kind)
        module = ir.Module.parse(
            f"func.func public @main({', '.join(map(': '.join, zip(names, kinds, strict=True)))}) -> ({makes}) {{"
            f" %r:{len(op.results)} = stablehlo.custom_call @{target}({', '.join(names)})"
            f" : ({', '.join(kinds)}) -> ({makes})"
            f" return {', '.join(f'%r#{i}' for i in range(len(op.results)))} : {makes} }}"
        )
        call = entry_block(functions_of(module)["main"]).operations[0].operation
        call.attributes["backend_config"] = ir.StringAttr.get(op.form.text())

        def annotation(spec: Spec) -> Any:
            return ir.StringAttr.get(_tiles(spec, mesh, grid))

        regions = Regions(module, mesh, platform, annotation, shardy=False, grid=grid)
        regions.channel += channel * len(op.results)
        regions.replace(call, reads, wanted)
        found = _jax.mlir.mlir_module_to_xla_computation(bytecode(module), use_tuple_args=False, return_tuple=True)
        proto: bytes = found.as_serialized_hlo_module_proto()
        return proto


def _tiles(spec: Spec, mesh: Mesh, grid: np.ndarray[Any, Any]) -> str:
    """The `HloSharding` of a spec with its devices named one by one."""
    used = [axis for dim in spec for axis in dim if mesh.axis_size(axis) > 1]
    if not used:
        return "{replicated}"
    rest = [axis for axis in mesh.axis_names if axis not in used]
    order = [mesh.axis_names.index(axis) for axis in (*used, *rest)]
    copies = mesh.size // mesh.ways(used)
    sizes = [*(mesh.ways(dim) for dim in spec), *([copies] if copies > 1 else [])]
    devices = ",".join(map(str, grid.transpose(order).flatten()))
    return f"{{devices=[{','.join(map(str, sizes))}]{devices}{' last_tile_dim_replicate' if copies > 1 else ''}}}"


class Regions:
    """Writes the regions of one module; lives inside its MLIR context.

    Args:
        module: the module.
        mesh: whose devices the region is over.
        platform, device: of the kernels.
        annotation: a spec as an attribute, in the module's form.
        shardy: the module's form.
        grid: the partition at each position of the mesh; by default row-major.
    """

    def __init__(
        self, module: Any, mesh: Mesh, platform: Platform, annotation: Callable[[Spec], Any], shardy: bool,
        grid: np.ndarray[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """Nothing is written yet."""
        self.grid = np.arange(prod(mesh.shape), dtype=np.int64).reshape(mesh.shape) if grid is None else grid
        self.module, self.mesh, self.platform = module, mesh, platform
        self.annotation, self.shardy = annotation, shardy
        self.called: set[str] = set()
        self.channel = 1000

    def replace(self, op: Any, reads: Sequence[Spec], wanted: Sequence[Spec]) -> None:
        """Replace a custom call of `TARGETS` whose operands and results are annotated so."""
        from jaxlib.mlir import ir

        kind = TARGETS[op.attributes["call_target_name"].value]
        results, taken = self._results(op)
        operands = tuple(_type(value) for value in op.operands)
        form = form_class(kind).parse(op.attributes["backend_config"].value)
        signature = Signature(kind, form, operands, tuple(results))
        region = Region.of(signature, reads, wanted, self.mesh)
        local = tuple(
            TensorType(self.mesh.shard_shape(each.shape, spec), each.dtype)
            for each, spec in zip(operands, region.operands, strict=True)
        )
        device = self.mesh.device.split(":")[0]
        kernel = kernel_of(signature, local, self.mesh.ways(region.extras), self.platform, device)
        self._define(kernel)
        with ir.InsertionPoint(op), op.location:
            made = self.write(region, list(op.operands), results, kernel)
        for values, value in zip(taken, made, strict=True):
            for each in values:
                each.replace_all_uses_with(value)
        for each in {value.owner for values in taken for value in values}:
            if each.name == "stablehlo.get_tuple_element":
                each.erase()
        op.erase()

    @staticmethod
    def _results(op: Any) -> tuple[list[TensorType], list[list[Any]]]:
        """Types of the results, and the values that stand for each: of a tuple, its elements as they are taken."""
        from jaxlib.mlir import ir

        if len(op.results) > 1 or not isinstance(op.results[0].type, ir.TupleType):
            return [_type(value) for value in op.results], [[value] for value in op.results]

        kinds = ir.TupleType(op.results[0].type)
        found = [_tensor(kinds.get_type(place)) for place in range(kinds.num_types)]
        taken: list[list[Any]] = [[] for _ in found]
        for use in op.results[0].uses:
            taken[use.owner.attributes["index"].value].append(use.owner.results[0])
        return found, taken

    def _define(self, kernel: Kernel) -> None:
        """Add the kernel's functions to the module."""
        from jaxlib.mlir import ir

        if kernel.entry in self.called:
            return
        self.called.add(kernel.entry)
        text = kernel.text
        with ir.InsertionPoint(self.module.body):
            for function in ir.Module.parse("module {\n" + text + "}\n").body.operations:
                self.module.body.append(function.operation.clone())

    def write(self, region: Region, operands: list[Any], results: Sequence[TensorType], kernel: Kernel) -> list[Any]:
        """The ops of a region at the present insertion point; returns its results."""
        from jaxlib.mlir import ir

        specs = list(region.operands)
        for array, dim in kernel.extras:
            operands.append(self._op("stablehlo.constant", [], [_mlir_of(array)], value=_dense(array)))
            specs.append(tuple(region.extras if place == dim else () for place in range(array.ndim)))
        inside = [self._local(value.type, spec) for value, spec in zip(operands, specs, strict=True)]
        made = [_mlir(kind.shape, kind.dtype) for kind in results]
        if self.shardy:
            return self._manual_computation(region, operands, specs, inside, made, kernel)
        values = []
        for value, spec, kind in zip(operands, specs, inside, strict=True):
            value = self._call("Sharding", value, value.type, self.annotation(spec))
            values.append(self._call("SPMDFullToShardShape", value, kind, _MANUAL))
        outside = []
        for value, spec, kind in zip(self._body(region, values, results, kernel), region.results, made, strict=True):
            value = self._call("Sharding", value, value.type, _MANUAL)
            outside.append(self._call("SPMDShardToFullShape", value, kind, self.annotation(spec)))
        assert all(isinstance(value.owner, ir.Operation | ir.OpView) for value in outside)
        return outside

    def _manual_computation(
        self, region: Region, operands: Sequence[Any], specs: Sequence[Spec], inside: Sequence[Any],
        made: Sequence[Any], kernel: Kernel,
    ) -> list[Any]:  # fmt: skip
        from jaxlib.mlir import ir

        def several(some: Sequence[Spec]) -> str:
            return "#sdy.sharding_per_value<[" + ", ".join(
                str(self.annotation(spec)).removeprefix("#sdy.sharding") for spec in some
            ) + "]>"  # fmt: skip

        axes = [axis for axis, size in zip(self.mesh.axis_names, self.mesh.shape, strict=True) if size > 1]
        op = ir.Operation.create(
            "sdy.manual_computation", results=list(made), operands=list(operands), regions=1,
            attributes={
                "in_shardings": ir.Attribute.parse(several(specs)),
                "out_shardings": ir.Attribute.parse(several(region.results)),
                "manual_axes": ir.Attribute.parse("#sdy<manual_axes{" + ", ".join(f'"{a}"' for a in axes) + "}>"),
            },
        )  # fmt: skip
        block = op.regions[0].blocks.append(*inside)
        with ir.InsertionPoint(block):
            results = [TensorType(kind.shape, kind.dtype) for kind in map(_tensor, made)]
            found = self._body(region, list(block.arguments), results, kernel)
            ir.Operation.create("sdy.return", operands=found)
        return list(op.results)

    def _body(self, region: Region, values: list[Any], results: Sequence[TensorType], kernel: Kernel) -> list[Any]:
        """The call of the kernel on local values, and the sums after it."""
        from jaxlib.mlir import ir

        kinds = []
        for result, spec, summed, scattered in zip(results, region.results, region.sums, region.scattered, strict=True):
            spec = tuple(
                axes[: len(axes) - len(summed)] if place == scattered else axes for place, axes in enumerate(spec)
            )
            kinds.append(_mlir(self.mesh.shard_shape(result.shape, spec), result.dtype))
        callee = ir.FlatSymbolRefAttr.get(kernel.entry)
        call = ir.Operation.create("func.call", results=kinds, operands=values, attributes={"callee": callee})
        sums = zip(call.results, region.sums, region.scattered, strict=True)
        return [self._sum(value, axes, scattered) if axes else value for value, axes, scattered in sums]

    def _sum(self, value: Any, axes: Sequence[str], scattered: int | None) -> Any:
        """An all-reduce over these axes, or a reduce-scatter along a dim in the order of these axes."""
        from jaxlib.mlir import ir

        self.channel += 1
        ways = self.mesh.ways(axes)
        shape = list(value.type.shape)
        if scattered is not None:
            shape[scattered] //= ways
        kind = ir.RankedTensorType.get(shape, value.type.element_type)
        attributes = {
            "replica_groups": _dense(replica_groups(self.mesh, axes, self.grid)),
            "channel_handle": ir.Attribute.parse(f"#stablehlo.channel_handle<handle = {self.channel}, type = 1>"),
            "use_global_device_ids": ir.UnitAttr.get(),
        }
        if scattered is not None:
            attributes["scatter_dimension"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), scattered)
        name = "stablehlo.reduce_scatter" if scattered is not None else "stablehlo.all_reduce"
        op = ir.Operation.create(name, results=[kind], operands=[value], attributes=attributes, regions=1)
        scalar = ir.RankedTensorType.get([], value.type.element_type)
        block = op.regions[0].blocks.append(scalar, scalar)
        with ir.InsertionPoint(block):
            total = ir.Operation.create("stablehlo.add", results=[scalar], operands=list(block.arguments))
            ir.Operation.create("stablehlo.return", operands=list(total.results))
        return op.results[0]

    def _local(self, kind: Any, spec: Spec) -> Any:
        from jaxlib.mlir import ir

        return ir.RankedTensorType.get(self.mesh.shard_shape(tuple(kind.shape), spec), kind.element_type)

    def _call(self, target: str, value: Any, kind: Any, sharding: Any) -> Any:
        from jaxlib.mlir import ir

        text = ir.StringAttr.get(sharding) if isinstance(sharding, str) else sharding
        attributes = {"call_target_name": ir.StringAttr.get(target), "mhlo.sharding": text}
        return ir.Operation.create(
            "stablehlo.custom_call", results=[kind], operands=[value], attributes=attributes
        ).results[0]  # fmt: skip

    @staticmethod
    def _op(name: str, operands: Sequence[Any], results: Sequence[Any], **attributes: Any) -> Any:
        from jaxlib.mlir import ir

        return ir.Operation.create(name, results=results, operands=operands, attributes=attributes).results[0]


_MANUAL = "{manual}"


def is_region(op: Any) -> bool:
    """Whether an op of a module is an attention, or experts, kept as one op."""
    return bool(op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value in TARGETS)


def replica_groups(mesh: Mesh, axes: Sequence[str], grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Partitions that differ along `axes` only, int64 `(groups, partitions)`, ordered by `axes` in each group."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    moved = np.moveaxis(grid, places, range(grid.ndim - len(places), grid.ndim))
    return moved.reshape(-1, mesh.ways(axes))


def _dense(array: np.ndarray[Any, Any]) -> Any:
    from jaxlib.mlir import ir

    return ir.DenseElementsAttr.get(np.ascontiguousarray(array))


def _mlir_of(array: np.ndarray[Any, Any]) -> Any:
    return _dense(array).type


def _mlir(shape: Sequence[int], dtype: str) -> Any:
    from jaxlib.mlir import ir

    return ir.Type.parse(f"tensor<{''.join(f'{n}x' for n in shape)}{dtype}>")


def _type(value: Any) -> TensorType:
    return _tensor(value.type)


def _tensor(kind: Any) -> TensorType:
    from jaxlib.mlir import ir

    ranked = ir.RankedTensorType(kind)
    return TensorType(tuple(ranked.shape), str(ranked.element_type))
