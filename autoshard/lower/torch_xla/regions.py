"""Runs attentions and experts in a torch_xla step: the region that the plan says, as a computation of its own."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from autoshard.frontends.tracing.device import tensor_type
from autoshard.frontends.tracing.regions import Tensors, executed_by
from autoshard.frontends.tracing.sequence import Call
from autoshard.fused import TARGETS, Form, Signature, dims_of
from autoshard.lower.torch_xla import runtime
from autoshard.lower.torch_xla.schedule import Schedule
from autoshard.mesh import Mesh, Spec, replicated
from autoshard.plans.value import Plan
from autoshard.regions.kernel import Platform
from autoshard.stablehlo.regions import region_hlo
from autoshard.version import version_of

_NAMES = frozenset(f"{target}.default" for target in TARGETS)


def executing(schedule: Schedule, call: Call, platform: Platform) -> AbstractContextManager[None]:
    """Around an op: an attention, or experts, run the kernel of `platform` on each device's part."""
    if call.name not in _NAMES:
        return nullcontext()

    def run(kind: str, form: Form, operands: Tensors, results: Tensors) -> Tensors:
        import torch_xla

        op = Signature(kind, form, tuple(map(tensor_type, operands)), tuple(map(tensor_type, results)))
        none = (replicated(len(each.shape)) for each in op.results)
        wanted = tuple(schedule.pins.get((call.index, j), whole) for j, whole in enumerate(none))
        devices = tuple(runtime.xla_mesh(schedule.mesh).device_ids.flatten().tolist())
        needed = any((call.index, j) in schedule.pins for j in range(len(op.results)))  # not only computed again
        say = dims_of(kind, form, [each.shape for each in op.operands]).operands_say if needed else ()
        reads = tuple(
            schedule.read(call.index, place) if place in say else replicated(len(each.shape))
            for place, each in enumerate(op.operands)
        )
        made = _computation(op, reads, wanted, schedule.mesh, platform, devices, call.index)
        found: Tensors = torch_xla._XLAC._xla_user_computation(
            f"autoshard::{kind}", [runtime.plain(each) for each in operands], made
        )
        return found

    return executed_by(run)


@lru_cache(maxsize=256)
def _computation(
    op: Signature, reads: tuple[Spec, ...], wanted: tuple[Spec, ...], mesh: Mesh, platform: Platform,
    devices: tuple[int, ...], channel: int,
) -> Any:  # fmt: skip
    import torch_xla

    proto = region_hlo(op, reads, wanted, mesh, platform, devices, channel)
    return torch_xla._XLAC._xla_op_computation_from_module_proto(f"autoshard_{op.kind}", proto)


def warn_of_versions(plan: Plan) -> None:
    """Warn where the packages whose kernels compute a plan's regions are other versions than it was checked with."""
    planned = {**plan.info.get("attention", {}), **plan.info.get("experts", {})}.get("versions", {})
    other = {name: (at, here) for name, at in planned.items() if (here := version_of(name)) != at}
    if other:
        said = ", ".join(f"{name} {at} (here: {here or 'not installed'})" for name, (at, here) in sorted(other.items()))
        warnings.warn(
            f"this plan's attentions and experts were planned with the kernels of {said}: others may not compile, or "
            "take other memory; `autoshard verify` says",
            stacklevel=3,
        )


def platform_here() -> Platform:
    """The platform of the runtime's devices."""
    import torch_xla.runtime as xr

    return "tpu" if xr.device_type() == "TPU" else "cpu"
