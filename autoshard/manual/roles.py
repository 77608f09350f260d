"""Plans for transformers by what each mesh axis does: tensor, sequence, context, expert, fully sharded data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from autoshard.errors import ManualPlanError
from autoshard.graph.annotations import Annotations
from autoshard.graph.memo import per_graph
from autoshard.graph.ops import Graph, Value
from autoshard.manual.find import (
    Linear,
    forward_values,
    gradients,
    is_forward,
    linears,
    module_outputs,
    norms,
    product_readers,
    subtree_outputs,
    token_tables,
    wrapped_modules,
)
from autoshard.manual.pairs import pairs
from autoshard.manual.stacks import experts, product_pins
from autoshard.manual.write import arguments, split
from autoshard.mesh import Mesh, Spec, replicated, spec_axes

_COLUMN = re.compile(
    r"(^|\.)(c_attn|q_attn|c_fc|[qkv](_proj|_lin)?|w[qkv]|qkv(_proj)?|in_proj|gate(_up)?_proj|up_proj|query|key|value|fc1"
    r"|wi(_\d)?|w1|w3|query_key_value|dense_h_to_4h|intermediate\.dense|lin1)$"
)
_ROW = re.compile(r"(^|\.)(c_proj|o|o_proj|out_proj|out_lin|down_proj|fc2|wo|w2|dense_4h_to_h|output\.dense|lin2)$")
_HEADS = ("lm_head.weight", "wte.weight", "embed_tokens.weight", "word_embeddings.weight", "shared.weight")


@dataclass(frozen=True)
class Roles:
    """What the axes of a mesh do; one may do several things.

    Attributes:
        batch: split the first dim of inputs and activations.
        shard: split parameters and their states besides, each gathered where it is used (FSDP).
        tensor: split heads, hidden features and the vocabulary.
        context: split the sequence of inputs and activations; attention gathers keys and values.
        expert: split stacks of experts by expert.
        sequence: whether `tensor` splits the sequence outside the tensor-parallel regions (arXiv:2205.05198).
        fsdp2: whether `shard` is torch's FSDP2: it may split a dim that `tensor` splits already, behind it, and
            annotated copies gather every parameter for what reads it.
    """

    batch: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    expert: tuple[str, ...] = ()
    sequence: bool = False
    fsdp2: bool = False


@dataclass(frozen=True)
class Layout:
    """Specs of activations (batch, sequence, features) under some roles."""

    graph: Graph
    mesh: Mesh
    roles: Roles

    def spec(self, value: Value, *, features: bool = False, along: bool = False) -> Spec:
        """Batch and context split; features, or the sequence, by the tensor axis too. What does not divide is whole."""
        shape = self.graph.type_of(value).shape
        dims: dict[int, Sequence[str]] = {0: self.roles.batch}
        if len(shape) > 2:
            dims[1] = self.roles.context + (self.roles.tensor if along else ())
        if features and len(shape) > 1:
            dims[len(shape) - 1] = self.roles.tensor
        fits = {dim: axes for dim, axes in dims.items() if shape and shape[dim] % self.mesh.ways(axes) == 0}
        return split(len(shape), fits)

    def pinned(self, values: Iterable[Value | None], *, along: bool = False) -> dict[Value, Spec]:
        """Pins of activations; of merged tokens (tokens, features) only where no context splits them."""
        least = 3 if self.roles.context or along else 2
        return {
            value: spec
            for value in values
            if value is not None and len(self.graph.type_of(value).shape) >= least
            if (spec := self.spec(value, along=along))[0] == self.roles.batch
        }


def composed(graph: Graph, mesh: Mesh, roles: Roles) -> Annotations:
    """The plan in which the axes have these roles.

    Annotated are what tensor and expert parallelism make (see `megatron`, `expert_parallel`), and outputs of embeddings
    and repeated blocks: with a tensor axis, of those blocks that end in a row-parallel layer.

    Raises:
        ManualPlanError: the program has no form for a role.
    """
    layout = Layout(graph, mesh, roles)
    specs: dict[str, Spec] = {}
    pins: dict[Value, Spec] = {}
    copies: dict[tuple[Value, int], Spec] = {}
    sequence = _sequence_of(graph, mesh, roles)
    if roles.shard or roles.context:
        pins |= layout.pinned(block_outputs(graph, rows=bool(roles.tensor)))
    if roles.context:
        pins |= layout.pinned(looked_up(graph))
    if roles.tensor:
        specs, split_pins = _tensor_parallel(layout)
        pins |= split_pins
    for stack in experts(graph):
        spec = specs.get(stack.name, replicated(3))
        if roles.expert and graph.type_of(stack.weight).shape[0] % mesh.ways(roles.expert) == 0:
            specs[stack.name] = spec = (roles.expert, *spec[1:])
        made = spec[3 - stack.contracted]
        if spec[0] or made or (roles.shard and not roles.tensor):
            batch = [axis for axis in roles.batch if axis not in spec[0]]
            pins |= product_pins(graph, mesh, stack, batch, expert=spec[0], made=made, sequence=sequence)
    if roles.sequence:
        residual, copies = _sequence_parallel(layout, specs)
        pins |= residual
    whole, specs = specs, _sharded(graph, mesh, specs, roles)
    if roles.fsdp2:
        summed, scattered = _scattered(graph, whole, specs)
        pins |= summed
        copies |= _gathered(graph, whole) | scattered
    return Annotations(arguments(graph, mesh, specs, roles.batch, sequence) | pins, copies)


def _sharded(graph: Graph, mesh: Mesh, specs: Mapping[str, Spec], roles: Roles) -> dict[str, Spec]:
    """Every parameter's spec with the axes of FSDP in it, where a dim divides."""
    found = dict(specs)
    for argument in graph.program.arguments if roles.shard else ():
        if argument.role == "parameter":
            spec = list(specs.get(argument.name, replicated(len(argument.type.shape))))
            axes = [axis for axis in roles.shard if axis not in spec_axes(tuple(spec))]
            for dim, size in enumerate(argument.type.shape):
                if size % mesh.ways((*spec[dim], *axes)) == 0 and (roles.fsdp2 or not spec[dim]):
                    spec[dim] = (*spec[dim], *axes)
                    break
            found[argument.name] = tuple(spec)
    return found


def _gathered(graph: Graph, specs: Mapping[str, Spec]) -> dict[tuple[Value, int], Spec]:
    """Copies of parameters without the axes of FSDP, for what reads them outside the optimizer."""
    return {
        (Value(op), reader.aten): specs.get(argument.name, replicated(len(argument.type.shape)))
        for op, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if argument.role == "parameter"
        for reader in graph.readers(Value(op))
        if reader.aten is not None and graph.program.ops[reader.aten].phase != "optimizer"
    }


def _scattered(
    graph: Graph, whole: Mapping[str, Spec], specs: Mapping[str, Spec]
) -> tuple[dict[Value, Spec], dict[tuple[Value, int], Spec]]:
    """Pins of gradients without the axes of FSDP, and copies with them, where both axes split one dim.

    A product whose result is split along one dim by an axis of its own and one that it sums over gathers its operands.
    """
    pins: dict[Value, Spec] = {}
    copies: dict[tuple[Value, int], Spec] = {}
    for name, value in gradients(graph).items():
        if any(before and before != after for before, after in zip(whole.get(name, ()), specs[name], strict=False)):
            pins[value] = whole[name]
            copies |= {(value, reader.aten): specs[name] for reader in graph.readers(value) if reader.aten is not None}
    return pins, copies


def _sequence_of(graph: Graph, mesh: Mesh, roles: Roles) -> tuple[int, tuple[str, ...]]:
    """How long sequences of tokens are, and the axes that split them.

    Raises:
        ManualPlanError: there are axes, and no sequences that they divide.
    """
    if not roles.context:
        return 0, ()
    lengths = {graph.type_of(value).shape[1] for value in looked_up(graph)}
    divided = [length for length in lengths if length % mesh.ways(roles.context) == 0]
    if not divided:
        raise ManualPlanError(
            f"context parallelism splits sequences of tokens, and no table is looked up for one that "
            f"{', '.join(roles.context)} divides"
        )
    return max(divided), roles.context


def block_outputs(graph: Graph, *, rows: bool = False) -> list[Value]:
    """The outputs of repeated blocks; with `rows`, of those with a row-parallel layer."""
    style = styles(graph) if rows else {}
    inside = [f"{each.module}." for each in linears(graph) if style.get(each.name) == "row"]
    outputs = subtree_outputs(graph)
    return [
        outputs[path]
        for path in wrapped_modules(graph)
        if path in outputs and (not rows or any(row.startswith(f"{path}.") for row in inside))
    ]


def looked_up(graph: Graph) -> list[Value]:
    """What token tables' modules make of (batch, sequence) tokens."""
    outputs = module_outputs(graph)
    made = (outputs.get(name.rpartition(".")[0]) for name in token_tables(graph))
    return [value for value in made if value is not None and len(graph.type_of(value).shape) == 3]


# --- tensor parallelism -------------------------------------------------------------------------------------------


def _tensor_parallel(layout: Layout) -> tuple[dict[str, Spec], dict[Value, Spec]]:
    """Megatron's specs of parameters by name, and pins of activations.

    Raises:
        ManualPlanError: the program has no pair of linear layers and no token embedding.
    """
    graph, tensor = layout.graph, layout.roles.tensor
    ways = layout.mesh.ways(tensor)
    layers, style, tables = linears(graph), styles(graph), token_tables(graph)
    if not tables and not {"row", "head"} & set(style.values()):
        raise ManualPlanError(
            "Megatron splits pairs of linear layers and token embeddings, and this program has neither"
        )
    specs: dict[str, Spec] = {}
    pins: dict[Value, Spec] = {}
    for layer in layers:
        kind = style[layer.name]
        shape = graph.type_of(layer.weight).shape
        dim = layer.contracted if kind == "row" else 1 - layer.contracted
        if kind == "head":
            pins |= split_logits(layout, layer)
        elif kind == "whole" or shape[dim] % ways:
            continue
        elif not layout.roles.context or len(graph.type_of(layer.output).shape) > 2:
            pins[layer.output] = layout.spec(layer.output, features=kind == "column")
        specs[layer.name] = split(2, {dim: tensor})
    for stack in experts(graph):
        row = pairs(graph)[stack.name] == "row" if stack.name in pairs(graph) else bool(_ROW.search(stack.name))
        dim = stack.contracted if row else 3 - stack.contracted
        if graph.type_of(stack.weight).shape[dim] % ways == 0:
            specs[stack.name] = split(3, {dim: tensor})
    specs |= {name: split(2, {0: tensor}) for name in tables}
    specs |= _biases(graph, layers, style, specs, tensor)
    return specs, pins | layout.pinned(looked_up(graph))


def split_logits(layout: Layout, head: Linear) -> dict[Value, Spec]:
    """The head's output, and values of its shape in the loss: split by batch and vocabulary, evenly or not."""
    spec = (*layout.spec(head.output)[:-1], layout.roles.tensor)
    return dict.fromkeys(like_logits(layout.graph, head), spec)


def like_logits(graph: Graph, head: Linear) -> list[Value]:
    """A head's output, and values of its shape in the loss."""
    shape = graph.type_of(head.output).shape
    return [value for _, value in forward_values(graph) if value >= head.output and graph.type_of(value).shape == shape]


@per_graph
def styles(graph: Graph) -> Mapping[str, str]:
    """Every linear layer as column, row, head or whole (replicated).

    A head makes logits over the vocabulary of a token table. Pairs go by what flows from one to the next (`pairs.py`),
    and by the names of model families where something mixes the features inside a pair; without either they alternate.
    """
    layers, found, tables = linears(graph), pairs(graph), token_tables(graph)
    rows = {each.name: each.type.shape[0] for each in graph.program.arguments if each.name in tables}
    style: dict[str, str] = {}
    for layer in layers:
        last = layer is layers[-1] and graph.type_of(layer.weight).shape[1 - layer.contracted] in rows.values()
        if layer.name.endswith(_HEADS) or layer.name in rows or last:
            style[layer.name] = "head"
        else:
            named = "column" if _COLUMN.search(layer.module) else "row" if _ROW.search(layer.module) else "whole"
            style[layer.name] = found.get(layer.name, named)
    if not {"column", "row"} & set(style.values()):
        chain = [layer.name for layer in layers if style[layer.name] == "whole"]
        style |= dict(zip(chain[: len(chain) // 2 * 2], cycle(("column", "row")), strict=False))
    return style


def _biases(
    graph: Graph, layers: Sequence[Linear], style: Mapping[str, str], specs: Mapping[str, Spec], tensor: tuple[str, ...]
) -> dict[str, Spec]:
    """Split a column-parallel layer's bias as its output."""
    column = {layer.module for layer in layers if style[layer.name] == "column" and layer.name in specs}
    return {
        argument.name: (tensor,)
        for argument in graph.program.arguments
        if argument.role == "parameter"
        and len(argument.type.shape) == 1
        and argument.name.endswith("bias")
        and argument.name.rpartition(".")[0] in column
    }


def _behind(graph: Graph, value: Value, shapes: Collection[tuple[int, ...]]) -> set[Value]:
    """The values of these shapes that a backward value is made of."""
    found: set[Value] = set()
    left, seen = [value], {value}
    while left:
        value = left.pop()
        op = graph.ops[value.op]
        if graph.type_of(value).shape in shapes:
            found.add(value)
        elif op.aten is not None and not is_forward(graph, op.aten):
            left += (new := set(op.operands) - seen)
            seen |= new
    return found


def _sequence_parallel(
    layout: Layout, specs: Mapping[str, Spec]
) -> tuple[dict[Value, Spec], dict[tuple[Value, int], Spec]]:
    """Pins along the sequence, and gathered copies, of Megatron's sequence parallelism.

    Raises:
        ManualPlanError: no row-parallel layer has a sequence dim that the tensor axis divides.
    """
    graph, tensor = layout.graph, layout.roles.tensor
    layers, style = linears(graph), styles(graph)

    def along(value: Value) -> Spec | None:
        spec = layout.spec(value, along=True)
        return spec if len(spec) == 3 and spec[0] == layout.roles.batch and tensor[-1] in spec[1] else None

    rows = [each for each in layers if style[each.name] == "row" and each.name in specs]
    residual = {each.output: spec for each in rows if (spec := along(each.output)) is not None}
    if not residual:
        raise ManualPlanError(
            f"sequence parallelism splits what goes from one tensor-parallel block to the next along its sequence, and "
            f"no row-parallel layer here makes a (batch, sequence, features) tensor whose sequence "
            f"{', '.join(tensor)} divides"
        )
    width = {graph.type_of(value).shape for value in residual}
    for made in [*looked_up(graph), *norms(graph).values(), *block_outputs(graph)]:
        if graph.type_of(made).shape in width and (spec := along(made)) is not None:
            residual[made] = spec
    reads = [each.input for each in layers] + [each.input for each in experts(graph)]
    gradients = {each.gradient for each in rows if each.gradient is not None}
    for each in experts(graph):
        if each.gradient is not None and specs.get(each.name, ((),) * 3)[each.contracted]:
            gradients |= _behind(graph, each.gradient, width)
    reads += gradients
    copies: dict[tuple[Value, int], Spec] = {}
    for value in reads:
        if value is None or graph.type_of(value).shape not in width:
            continue
        if value in gradients and (spec := along(value)) is not None:
            residual[value] = spec
        if value in residual:
            copies |= {(value, aten): layout.spec(value) for aten in product_readers(graph, value)}
    for layer in layers:
        if style[layer.name] == "whole" and layer.input in residual:
            residual |= layout.pinned(each for each in (layer.output, layer.gradient) if each not in residual)
    return residual, copies
