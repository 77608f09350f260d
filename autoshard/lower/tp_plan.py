"""A plan as transformers' `tp_plan`: one mesh axis, `nn.Linear` and `nn.Embedding`, a style each.

    styles, lost = plan.to_tp_plan(model)
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_plan=styles, tp_size=4)
    )

Between layers of one module transformers passes each process's shard on (`colwise`, then `rowwise`). Where only some of
these layers are split, a shard would meet a full tensor: there every layer gathers its output (`colwise_gather_output`)
and splits its input (`rowwise_split_input`), which costs time and keeps results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.lower.module_values import module_values, starred
from autoshard.mesh import Spec, format_spec
from autoshard.plans.value import Plan, PlanMismatchError

_WHOLE = "replicate"
_GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
"""Style between shards -> the same between full tensors."""


def to_tp_plan(plan: Plan, model: Any, axis: str | None = None) -> tuple[dict[str, str], list[str]]:
    """The plan as `tp_plan`: path -> style, with `*` for numbers; and what that cannot express, a line each.

    Layers that the model's own `tp_plan` splits and this plan does not are `replicate`: a dict given to transformers
    overrides the model's rules one by one.

    Args:
        plan: any plan of the model.
        model: the planned model, also on meta.
        axis: the mesh axis of tensor parallelism; default the last.

    Raises:
        ValueError: the mesh has no such axis.
        PlanMismatchError: the model is not the planned one; names the first missing parameter.
    """
    axis = axis or plan.mesh.axis_names[-1]
    if axis not in plan.mesh.axis_names:
        raise ValueError(f"the plan's mesh has no axis {axis!r}, it has {', '.join(plan.mesh.axis_names)}")
    have = dict(model.named_parameters())
    for name, tensor in plan.parameters.items():
        if name not in have or tuple(have[name].shape) != tensor.shape:
            shape = f"has {name} of shape {tuple(have[name].shape)}" if name in have else f"has no parameter {name}"
            raise PlanMismatchError(f"the plan is for another model: this one {shape}")
    said: dict[str, str] = {}
    lost = list(_styles(plan, model, axis, said))
    lost += dict.fromkeys(_between_slices(model, said))  # once for all layers
    own = getattr(model, "tp_plan", None) or {}
    kinds: dict[str, dict[str, str]] = {}
    for path, style in said.items():
        kinds.setdefault(starred(path), {})[path] = style
    styles = {}
    for star, several in kinds.items():
        if len(set(several.values())) > 1:
            each = ", ".join(f"{path} {style}" for path, style in list(several.items())[:2])
            lost.append(f"{star}: its layers are split differently ({each}); a rule holds for all of them")
            style = _WHOLE
        else:
            style = next(iter(several.values()))
        if style != _WHOLE or star in own:
            styles[star] = style
    return styles, lost


def _styles(plan: Plan, model: Any, axis: str, said: dict[str, str]) -> Iterator[str]:
    """Put the style of every layer into `said`, as if all stood between shards; yields what is inexpressible."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    reads = module_values(plan).reads
    told = set()
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        name = names.get(id(weight), "")
        tensor = plan.parameters.get(name)
        if tensor is None or tensor.spec == () or len(tensor.shape) != 2:
            continue
        told.add(name)
        spec = reads.get(name, tensor.spec)
        style = said[path] = _style(module, spec, axis)
        whole = f"{path}: {type(module).__name__}"
        if style == _WHOLE and _has(spec, axis):
            yield f"{whole} split {format_spec(spec)}"
        elif any(each != axis for dim in tensor.spec for each in dim):
            yield f"{path}: split by other axes too, {format_spec(tensor.spec)}"
        elif spec != tensor.spec:
            yield f"{whole} kept split {format_spec(tensor.spec)}, read {format_spec(spec)}"
    for name, tensor in plan.parameters.items():
        owner, _, kind = name.rpartition(".")
        if name not in told and any(tensor.spec) and not (kind == "bias" and said.get(owner) == "colwise"):
            yield f"{name}: split {format_spec(tensor.spec)}, no weight of an nn.Linear or nn.Embedding"


def _style(module: Any, spec: Spec, axis: str) -> str:
    import torch

    split = [dim for dim, axes in enumerate(spec) if axes == (axis,)]
    if len(split) == 1 and isinstance(module, torch.nn.Linear):
        return ("colwise", "rowwise")[split[0]]
    if len(split) == 1 and isinstance(module, torch.nn.Embedding):
        return ("embedding_rowwise", "embedding_colwise")[split[0]]
    return _WHOLE


def _between_slices(model: Any, said: dict[str, str]) -> Iterator[str]:
    """Insert gathers between shards and full tensors; yields the modules where the plan has none."""
    together: dict[str, list[str]] = {}
    for path, style in said.items():
        if style in (*_GATHERED, _WHOLE):
            together.setdefault(path.rpartition(".")[0], []).append(path)
    for parent, paths in together.items():
        styles = [said[path] for path in paths]
        if set(styles) == set(_GATHERED):
            continue
        said.update({path: _GATHERED.get(said[path], said[path]) for path in paths})
        if len(paths) > 1 and len(set(styles)) > 1:
            yield f"{starred(parent) or 'the model'}: only some of its layers are split; what they make is gathered"


def _has(spec: Spec, axis: str) -> bool:
    return any(axis in dim for dim in spec)
