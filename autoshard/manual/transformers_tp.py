"""The tensor parallel plan of a transformers model (`base_model_tp_plan`), recorded at capture.

Styles are those that transformers 5.23 registers (`transformers/distributed/tensor_parallel.py`); each splits the
parameters and the output of the module that it is named for over the last axis. The other axes split the batch.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import linears, product_readers, subtree_outputs
from autoshard.manual.write import arguments, split
from autoshard.mesh import Mesh, Spec

_WEIGHT_DIM: Mapping[str, int | None] = {
    "colwise": -2,
    "colwise_rep": -2,
    "colwise_gather_output": -2,
    "packed_colwise": -2,
    "local_colwise": -2,
    "local_packed_colwise": -2,
    "rowwise": -1,
    "rowwise_rep": -1,
    "rowwise_split_input": -1,
    "packed_rowwise": -1,
    "local_rowwise": -1,
    "embedding_rowwise": -2,
    "embedding_colwise": -1,
    "vocab_parallel_rowwise": -2,
    "grouped_gemm": 0,
    "sequence_parallel": None,
    "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None,
    "all_reduce": None,
    "gather": None,
    "moe_tp_experts": None,
    "moe_identity_expert": None,
    "local": None,
    "local_params": None,
    "replicate": None,
}
"""Style -> the dim of a weight that it splits; None for none."""

_ON_VECTORS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "local_colwise")
"""Styles that split a bias as well."""

_WHOLE_OUTPUT = (
    *("colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep", "rowwise_split_input", "all_reduce"),
    *("embedding_rowwise", "embedding_colwise", "vocab_parallel_rowwise", "gather", "moe_tp_experts"),
)
_SPLIT_INPUT = ("rowwise", "rowwise_rep", "rowwise_split_input")


class UnknownStyleWarning(UserWarning):
    """A model's tensor parallel plan has an unknown style: its modules are replicated."""


def transformers_plan(graph: Graph, mesh: Mesh) -> Annotations:
    """The model's own plan (`base_model_tp_plan`) over the last axis; data parallelism over the others.

    Each module's style splits its weights, evenly or not; packed ones (gate and up in one weight) in contiguous parts,
    since GSPMD has no strided ones. Its output is annotated: replicated, or split on its last dim; also the input of a
    row-parallel layer that splits it; the sequence under `sequence_parallel`. Parameters without a style, or with an
    unknown one (a warning names it), are replicated.

    Raises:
        ManualPlanError: the model has no plan, or was captured from a file.
    """
    plan = graph.program.tp_plan
    if not plan:
        raise ManualPlanError(
            "the model carries no tensor parallel plan: of transformers' models those have one whose configuration "
            "class has a base_model_tp_plan"
        )
    plan = _known_styles(plan)
    *data, model = mesh.axis_names
    specs: dict[str, Spec] = {}
    for argument in graph.program.arguments:
        if argument.role in ("parameter", "buffer"):
            style = _style(argument.name, plan) or _style(argument.name.rpartition(".")[0], plan)
            dim = None if style is None else _weight_dim(style, len(argument.type.shape))
            if dim is not None and argument.type.shape[dim] >= mesh.axis_size(model):
                specs[argument.name] = split(len(argument.type.shape), {dim: (model,)})
    if not specs:
        raise ManualPlanError("the model's tensor parallel plan names none of its parameters")
    pins, copies = _activations(graph, mesh, plan)
    return Annotations(arguments(graph, mesh, specs, data) | pins, copies)


def _known_styles(plan: Mapping[str, str]) -> dict[str, str]:
    """The entries whose style is known; a warning names the others."""
    left_out = {path: style for path, style in plan.items() if style not in _WEIGHT_DIM}
    if left_out:
        path, style = min(left_out.items())
        warnings.warn(
            f"the model's tensor parallel plan gives {path} the style {style!r}"
            f"{f' (and {len(left_out) - 1} more like it)' if len(left_out) > 1 else ''}, which is not known here: "
            f"left out, its parameters are replicated; known are {', '.join(_WEIGHT_DIM)}",
            UnknownStyleWarning,
            stacklevel=3,
        )
    return {path: style for path, style in plan.items() if path not in left_out}


def _style(path: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)) or plan.get(path)


def _weight_dim(style: str, rank: int) -> int | None:
    dim = _WEIGHT_DIM[style]
    if dim is None or rank == 0:
        return None
    if rank == 1:
        return 0 if style in _ON_VECTORS or dim == 0 else None
    return dim % rank


def _activations(
    graph: Graph, mesh: Mesh, plan: Mapping[str, str]
) -> tuple[dict[Value, Spec], dict[tuple[Value, int], Spec]]:
    *data, model = mesh.axis_names
    pins: dict[Value, Spec] = {}
    copies: dict[tuple[Value, int], Spec] = {}

    def spec(value: Value, dim: int | None) -> Spec | None:
        """Batch split, and `dim` split by the model axis; None where that axis has nothing to split."""
        shape = graph.type_of(value).shape
        if len(shape) < 2 or shape[0] % mesh.ways(data):
            return None
        if dim is not None and (dim % len(shape) == 0 or shape[dim] < mesh.axis_size(model)):
            return None
        return split(len(shape), {0: data} | ({} if dim is None else {dim % len(shape): (model,)}))

    for path, value in subtree_outputs(graph).items():
        style = _style(path, plan)
        if style is None:
            continue
        dim = 1 if style == "sequence_parallel" else -1 if style.startswith("colwise") else None
        kept = style in _WHOLE_OUTPUT
        if (kept or dim is not None) and (found := spec(value, None if kept else dim)) is not None:
            pins[value] = found
    for layer in linears(graph):
        read = layer.input
        if _style(layer.module, plan) not in _SPLIT_INPUT or read is None or read in pins:
            continue
        if (found := spec(read, -1)) is not None:
            copies.update({(read, aten): found for aten in product_readers(graph, read)})
    return pins, copies
