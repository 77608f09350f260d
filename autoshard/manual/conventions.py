"""The shardings of two training frameworks, by the names of their mesh axes.

Where a mesh has other names, axes have roles by place: the last of several is the tensor axis, the one before it
FSDP's, the first of three for copies (HSDP).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import is_forward, linears, norms, through_views, token_tables
from autoshard.manual.pairs import pairs
from autoshard.manual.roles import Roles, block_outputs, composed, like_logits, looked_up, styles
from autoshard.manual.stacks import experts, product_pins
from autoshard.manual.write import arguments, split
from autoshard.mesh import Mesh, Spec

TORCHTITAN = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
MAXTEXT = ("data", "fsdp", "sequence", "context", "tensor", "tensor_sequence", "expert")


def _named(mesh: Mesh, known: Sequence[str], by_place: Sequence[str]) -> dict[str, str]:
    """What each axis is called in a framework -> its name in the mesh: by name, else by place."""
    if set(mesh.axis_names) <= set(known) and mesh.axis_names != ("data",):
        return {name: name for name in mesh.axis_names}
    if len(mesh.axis_names) > len(by_place):
        raise ManualPlanError(f"a mesh of {len(mesh.axis_names)} axes needs their names: {', '.join(known)}")
    copies, shard, tensor = by_place
    roles = {1: (shard,), 2: (shard, tensor), 3: (copies, shard, tensor)}[len(mesh.axis_names)]
    return dict(zip(roles, mesh.axis_names, strict=True))


def torchtitan(graph: Graph, mesh: Mesh) -> Annotations:
    """torchtitan's plan for Llama and DeepSeek: its mesh axes `dp_replicate`, `dp_shard`, `cp`, `tp` and `ep`.

    Tensor parallelism with sequence-parallel norms and a loss over the vocabulary (`tp`), FSDP of every parameter's
    first dim behind it (`dp_shard`, `cp`, `ep`), copies over `dp_replicate`, the sequence over `cp`, experts over `ep`,
    which also splits the batch. Gradients that both split along one dim are annotated without FSDP first.

    Raises:
        ManualPlanError: as `sequence_parallel`, where there is a tensor axis.
    """
    axes = _named(mesh, TORCHTITAN, (*TORCHTITAN[:2], "tp"))

    def over(*names: str) -> tuple[str, ...]:
        return tuple(axes[name] for name in names if name in axes)

    return composed(
        graph,
        mesh,
        Roles(
            batch=over("dp_replicate", "dp_shard", "ep"),
            shard=over("dp_shard", "cp", "ep"),
            tensor=over("tp"),
            context=over("cp"),
            expert=over("ep"),
            sequence="tp" in axes,
            fsdp2=True,
        ),
    )


_RULES = (
    ("batch", ("data", "fsdp", "expert")),
    ("heads", ("tensor", "sequence", "tensor_sequence")),
    ("length", ("sequence", "context")),
    ("length", ("context",)),
    ("norm_length", ("tensor_sequence", "context", "sequence")),
    ("features", ("tensor",)),
    ("hidden", ("tensor", "tensor_sequence")),
    ("mlp", ("tensor", "tensor_sequence")),
    ("embed", ("fsdp", "sequence", "context", "expert")),
    ("embed_no_exp", ("fsdp", "sequence", "context")),
    ("norm", ("tensor",)),
    ("exp", ("expert",)),
)
"""MaxText's `logical_axis_rules` (configs/base.yml) for the axes in `MAXTEXT`, in its order: what a dim is -> axes.

`heads`, `hidden` and `features` are dims of activations (attention's, the feed-forward layer's and the logits', the
residual path's), `mlp` the tensor-parallel dim of a weight, `embed` its other one. A rule counts where no dim of the
tensor has any of its axes yet (flax's `logical_to_mesh_axes`).
"""


def _logical(mesh: Mesh, axes: dict[str, str], dims: Sequence[str], shape: Sequence[int]) -> Spec:
    """The spec of a tensor with these logical dims; a dim that does not divide is whole."""
    taken: set[str] = set()
    found: dict[int, tuple[str, ...]] = {}
    for name, over in _RULES:
        if name in dims and dims.index(name) not in found and not taken & set(over):
            dim = dims.index(name)
            found[dim] = tuple(axes[axis] for axis in over if axis in axes)
            taken |= set(over)
    ordered = {dim: mesh.in_order(names) for dim, names in found.items()}
    return split(len(shape), {d: names for d, names in ordered.items() if shape[d] % mesh.ways(names) == 0})


def maxtext(graph: Graph, mesh: Mesh) -> Annotations:
    """MaxText's logical axis rules: its mesh axes `data`, `fsdp`, `sequence`, `context`, `tensor`, `expert`….

    Weights are split on their embed dim by `fsdp` (and what splits the sequence) and on heads, hidden features and
    vocabulary by `tensor`; norms' by `tensor`. Between products activations are split by batch, sequence and, by
    `tensor`, features (with `tensor_sequence` the sequence), column outputs and logits on their last dim, products of
    experts by expert.

    Raises:
        ManualPlanError: the program has no pair of linear layers and no token embedding.
    """
    axes = _named(mesh, MAXTEXT, ("data", "fsdp", "tensor"))
    layers, style, tables = linears(graph), styles(graph), token_tables(graph)
    if not tables and "row" not in style.values():
        raise ManualPlanError("MaxText's rules are for decoders, and this program has no pair of linear layers")
    types = {each.name: each.type.shape for each in graph.program.arguments}
    specs: dict[str, Spec] = {}
    for layer in layers:
        inside, outside = {"row": ("mlp", "embed"), "whole": ("embed", "")}.get(style[layer.name], ("embed", "mlp"))
        dims = (inside, outside) if layer.contracted == 0 else (outside, inside)
        specs[layer.name] = _logical(mesh, axes, dims, types[layer.name])
    for stack in experts(graph):
        row = pairs(graph).get(stack.name) == "row"
        inside, outside = ("mlp", "embed_no_exp") if row else ("embed_no_exp", "mlp")
        dims = (inside, outside) if stack.contracted == 1 else (outside, inside)
        specs[stack.name] = _logical(mesh, axes, ("exp", *dims), types[stack.name])
    for name in tables:
        specs[name] = _logical(mesh, axes, ("mlp", "embed"), types[name])
    vectors = dict.fromkeys(norms(graph), "norm")
    vectors |= {layer.module: "mlp" for layer in layers if style[layer.name] == "column"}
    for name, shape in types.items():
        if len(shape) == 1 and (dim := vectors.get(name.rpartition(".")[0])) is not None:
            specs[name] = _logical(mesh, axes, (dim,), shape)
    pins = _activations(graph, mesh, axes)
    batch = next(over for name, over in _RULES if name == "batch")
    data = [axis for axis in mesh.axis_names if axis in {axes[name] for name in batch if name in axes}]
    if "expert" in axes:
        others = [axis for axis in data if axis != axes["expert"]]
        made = _logical(mesh, axes, ("mlp",), (mesh.size,))[0]
        for stack in experts(graph):
            pins |= product_pins(graph, mesh, stack, others, expert=specs[stack.name][0], made=made)
    tokens = next(iter(looked_up(graph)), None)
    length = (0, ()) if tokens is None else _length(graph, mesh, axes, tokens)
    return Annotations(arguments(graph, mesh, specs, data, length) | pins)


def _length(graph: Graph, mesh: Mesh, axes: dict[str, str], tokens: Value) -> tuple[int, tuple[str, ...]]:
    """How long sequences are, and the axes that split those of inputs."""
    shape = graph.type_of(tokens).shape
    return shape[1], _logical(mesh, axes, ("batch", "norm_length", "features"), shape)[1]


def _activations(graph: Graph, mesh: Mesh, axes: dict[str, str]) -> dict[Value, Spec]:
    """Pins of what MaxText constrains: (batch, sequence, features) between products, column outputs, logits."""
    layers, style = linears(graph), styles(graph)
    mixing = _attention_modules(graph)
    between = [*looked_up(graph), *norms(graph).values(), *block_outputs(graph, rows=True)]
    between += [each.output for each in layers if style[each.name] == "row"]
    wide = {graph.type_of(each.output).shape for each in layers if style[each.name] == "row"}
    logical = {value: ("batch", "norm_length", "features") for value in between if graph.type_of(value).shape in wide}
    for layer in layers:
        if style[layer.name] == "column":
            attention = layer.module.rpartition(".")[0] in mixing
            logical[layer.output] = ("batch", "length", "heads" if attention else "hidden")
        elif style[layer.name] == "head":
            logical |= dict.fromkeys(like_logits(graph, layer), ("batch", "length", "hidden"))
    shapes = {value: graph.type_of(value).shape for value in logical}
    return {
        value: _logical(mesh, axes, dims, shapes[value]) for value, dims in logical.items() if len(shapes[value]) == 3
    }


def _attention_modules(graph: Graph) -> set[str]:
    """The modules that make a product of two activations."""
    parameters = {Value(op) for op in graph.arguments}
    return {
        op.module
        for op in graph.ops
        if op.kind == "dot_general" and is_forward(graph, op.aten)
        if not any(through_views(graph, operand)[0] in parameters for operand in op.operands)
    }
