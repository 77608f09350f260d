"""The automatic mode: plans and annotates a torch_xla training loop, given one line.

    autoshard.use_spmd(auto=True, spmd_config={"auto_sharding": {"mesh": "2x4"}})    # for xr.use_spmd(auto=True)
    model = model.to("xla")

or, as a policy of PyTorch's API,

    model = distribute_module(model, DeviceMesh("xla", ids), autoshard.auto_policy)

with the loop unchanged: forward, loss, `backward()`, `optimizer.step()`, sync. **The first step** runs with parameters
split evenly over all devices, under XLA's propagation, and is recorded: the model and its inputs, the torch functions
between its output and `backward()`, the optimizer. At its end the program is captured on placeholders and planned (or
read from the cache), and the tensors are resharded as planned. **From the second step on** the ops from the model's
forward to the optimizer's step are annotated. An evaluation, a batch of another shape, or a part of a step that is not
planned runs under propagation; no loop is ended (`watch.py`).

Options, in `spmd_config["auto_sharding"]` or as `AUTOSHARD_MESH`, `AUTOSHARD_AXES`, `AUTOSHARD_DEVICE`,
`AUTOSHARD_MEMORY`, `AUTOSHARD_TIME_LIMIT` in the environment (arguments win): those of `autoshard.plan`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoshard.api import Plan
from autoshard.errors import AutoShardingError
from autoshard.mesh import Mesh
from autoshard.planning.meshes import candidate_meshes
from autoshard.quantities import parse_bytes

if TYPE_CHECKING:
    from autoshard.auto.watch import Watch

_OPTIONS = ("mesh", "axes", "device", "memory", "hints", "time_limit", "seed", "annotations", "cache")
_ENVIRONMENT = {
    "mesh": "AUTOSHARD_MESH", "axes": "AUTOSHARD_AXES", "device": "AUTOSHARD_DEVICE", "memory": "AUTOSHARD_MEMORY",
    "time_limit": "AUTOSHARD_TIME_LIMIT",
}  # fmt: skip


def use_spmd(auto: bool = False, spmd_config: Mapping[str, Any] | None = None) -> None:
    """`torch_xla.runtime.use_spmd`, with an automatic mode that shards; call it before the model is on the device.

    Args:
        auto: plan the first training step, and annotate those after it (see the module's docstring).
        spmd_config: `{"auto_sharding": {...}}` with options of `autoshard.plan`, and `cache` (default True).

    Raises:
        ValueError: an unknown option.
    """
    import torch_xla.runtime as xr

    options = _options(spmd_config)
    if not xr.is_spmd():
        xr.use_spmd()
    global _GLOBAL
    if _GLOBAL is not None:
        _GLOBAL.remove()
        _GLOBAL = None
    if auto:
        _GLOBAL = _watch(options)
        _GLOBAL.everywhere()


def auto_policy(name: str, module: Any, device_mesh: Any) -> None:
    """The `partition_fn` of `distribute_module(model, device_mesh, autoshard.auto_policy)` on an XLA device mesh.

    Parameters are split evenly at once, and resharded as planned after the first step.
    """
    if name:
        return  # called for every submodule; the whole model comes first, with no name
    if getattr(device_mesh, "device_type", "xla") != "xla":
        raise AutoShardingError(
            f"auto_policy is for device meshes of torch_xla, not {device_mesh.device_type}: "
            "for DTensor plan first, and use plan.to_dtensor(device_mesh)"
        )
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        xr.use_spmd()
    options = _options(None)
    names = device_mesh.mesh_dim_names
    options["mesh"] = Mesh(
        tuple(device_mesh.shape), tuple(names) if names else (), options.pop("device", None) or _kind()
    )
    options.pop("axes", None)
    _watch(options).on(module)


auto_policy.__name__ = (
    "autoshard_auto_policy"  # torch_xla takes a function *named* auto_policy for its own, and never calls it
)

_GLOBAL: Watch | None = None
_LAST: Plan | None = None


def current_plan() -> Plan | None:
    """The latest plan of the automatic mode, or None until the first step has ended."""
    return _LAST


def _watch(options: dict[str, Any]) -> Watch:
    from autoshard.auto.watch import Watch

    def planned(plan: Plan) -> None:
        global _LAST
        _LAST = plan

    return Watch(options, lambda: _meshes(options), planned)


def _options(spmd_config: Mapping[str, Any] | None) -> dict[str, Any]:
    given = dict((spmd_config or {}).get("auto_sharding") or {})
    unknown = [name for name in (spmd_config or {}) if name != "auto_sharding"] or [
        n for n in given if n not in _OPTIONS
    ]
    if unknown:
        raise ValueError(f"spmd_config has {unknown[0]!r}; auto_sharding takes {', '.join(_OPTIONS)}")
    for name, variable in _ENVIRONMENT.items():
        if os.environ.get(variable):
            given.setdefault(name, os.environ[variable])
    if isinstance(given.get("memory"), str):
        given["memory"] = None if given["memory"].lower() == "none" else parse_bytes(given["memory"])
    if "time_limit" in given:
        given["time_limit"] = float(given["time_limit"])
    return given


def _kind() -> str:
    """The kind of the attached devices, where torch_xla's runtime knows it."""
    import torch_xla.runtime as xr

    if xr.device_type() == "CPU":
        return "cpu"
    raise AutoShardingError(
        f"say which {xr.device_type()} this is, for its costs: AUTOSHARD_DEVICE=tpu-v5e, or device= in auto_sharding"
    )


def _meshes(options: Mapping[str, Any]) -> list[Mesh]:
    """The meshes to plan for."""
    import torch_xla.runtime as xr

    mesh, axes, device = (options.get(name) for name in ("mesh", "axes", "device"))
    if isinstance(mesh, str):
        mesh = Mesh.parse(mesh, axes, device or _kind())
        return candidate_meshes(mesh, None, None)
    if mesh is None:
        return candidate_meshes(None, xr.global_runtime_device_count(), device or _kind())
    return candidate_meshes(mesh, None, device or (None if isinstance(mesh, Mesh) else _kind()))
