"""A plan as one self-contained HTML page: shardings drawn on the mesh, and costs, module by module.

Styles, drawings (SVG) and script are in the page; nothing is loaded. Numbered modules of equal contents (`layers.0` to
`layers.30`) are shown once, with their summed costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from autoshard.cost.machine.bars import Bars, bar_text
from autoshard.dtypes import dtype_bytes
from autoshard.mesh import AxisGroup, Mesh, Spec, spec_axes
from autoshard.plans.value import ActivationPlan, CollectiveTotal, Copy, ModuleCost, Plan, TensorPlan
from autoshard.show.drawing import holders, tiles
from autoshard.show.explanation import Explanation
from autoshard.show.report import (
    activation_groups,
    confirmed_line,
    duration,
    layout,
    mesh_text,
    natural,
    ranges,
    remat_lines,
    shortest_first,
    size,
    states_of,
)
from autoshard.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

OPTIMIZER = "(optimizer step)"
PHASES = (("", "weights"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"))
"""Phase of a ModuleCost -> its name on the page."""
_WIDTH, _HEIGHT, _COLOURS, _LABELS, _LEGIBLE = 120, 48, 8, 32, 4.0
_MAX_LISTED_ROWS = 12


@dataclass
class Cost:
    """Seconds and collectives of a module in one phase."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    collectives: dict[tuple[str, AxisGroup], list[int]] = field(default_factory=dict)

    def add(self, compute_s: float, communication_s: float, totals: Iterable[CollectiveTotal]) -> None:
        """Add the costs of a part."""
        self.compute_s += compute_s
        self.communication_s += communication_s
        for each in totals:
            entry = self.collectives.setdefault((each.kind, each.axes), [0, 0])
            entry[0] += each.count
            entry[1] += each.bytes

    def totals(self) -> tuple[CollectiveTotal, ...]:
        """The collectives, in a fixed order."""
        return tuple(CollectiveTotal(*key, *entry) for key, entry in sorted(self.collectives.items()))


@dataclass(frozen=True)
class TensorRow:
    """A parameter or buffer of a module, or a group of its values."""

    name: str
    type: str
    spec: Spec | None
    reads: tuple[Spec, ...]
    device_bytes: int | None
    note: str = ""


@dataclass
class Node:
    """A module of the tree, or several equal ones.

    Attributes:
        label: last part of its path, or the numbers of its members.
        members: number of modules it stands for.
        own: phase -> its own costs, summed over members.
        tensors, values: of one member.
    """

    label: str
    path: str
    members: int = 1
    own: dict[str, Cost] = field(default_factory=dict)
    tensors: list[TensorRow] = field(default_factory=list)
    values: list[TensorRow] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    @property
    def compute_s(self) -> float:
        """Seconds of all its kernels, submodules included."""
        return sum(cost.compute_s for cost in self.own.values()) + sum(child.compute_s for child in self.children)

    @property
    def communication_s(self) -> float:
        """Seconds of all its collectives, submodules included."""
        own = sum(cost.communication_s for cost in self.own.values())
        return own + sum(child.communication_s for child in self.children)

    @property
    def device_bytes(self) -> int:
        """Bytes of its parameters and buffers on one device, of all members and submodules."""
        own = self.members * sum(row.device_bytes or 0 for row in self.tensors)
        return own + sum(child.device_bytes for child in self.children)

    def signature(self) -> object:
        """A key, equal for modules that differ in numbers alone."""
        below = tuple((child.label, child.members, child.signature()) for child in self.children)
        return tuple(self.tensors), tuple(self.values), below


def page(plan: Plan, explanations: Sequence[Explanation] = ()) -> str:
    """The page of a plan, with explanations of some tensors."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("autoshard.show", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawings = Drawings(plan.mesh)
    environment.filters.update(
        bar_text=bar_text, duration=duration, size=size, layout=layout, percent=_percent, at_dots=_at_dots
    )
    environment.globals.update(draw=drawings.symbol)
    predicted = plan.predicted
    step = predicted.step_time_s if predicted is not None else 0.0
    template = environment.get_template("plan.html.j2")
    whole: str = template.render(
        plan=plan,
        title=f"{'Training step' if plan.program.kind == 'train' else 'Forward pass'} on {mesh_text(plan.mesh)}",
        predicted=predicted,
        bars=Bars.of_info(plan.info),
        step=step,
        tree=tree(plan),
        tried=shortest_first(plan.search),
        phases=PHASES,
        parts=_parts(plan),
        collectives=_collectives(plan),
        memory=_memory(plan),
        remat=remat_lines(plan)[:1],
        confirmed=None if plan.confirmed is None else confirmed_line(plan.confirmed),
        inputs=[_tensor(plan.mesh, name, tensor) for name, tensor in plan.inputs.items()],
        outputs=[_tensor(plan.mesh, name, tensor) for name, tensor in plan.outputs.items()],
        undivided=undivided(plan, explanations),
        unruled=_unruled(plan),
        explanations=explanations,
        version=__version__,
        width=_WIDTH,
        height=_HEIGHT,
    )
    return whole.replace("<!--drawings-->", drawings.definitions(), 1)


# --- drawings ----------------------------------------------------------------------------------------------------


class Drawings:
    """Shardings drawn on the mesh: one SVG symbol per spec, used wherever that spec is shown."""

    def __init__(self, mesh: Mesh) -> None:
        """None yet."""
        self._mesh = mesh
        self._known: dict[Spec, str] = {}

    def symbol(self, spec: Spec) -> str:
        """Id of the symbol of a spec."""
        return self._known.setdefault(spec, f"s{len(self._known)}")

    def definitions(self) -> str:
        """All symbols."""
        return "".join(
            f'<symbol id="{name}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{self._drawn(spec)}</symbol>'
            for spec, name in self._known.items()
        )

    def _drawn(self, spec: Spec) -> str:
        grid = tiles(spec, self._mesh)
        rows, columns = grid.ways
        wide, high = _WIDTH / columns, _HEIGHT / rows
        edge = min(1.0, 0.15 * min(wide, high))  # a line as wide as a part would hide it
        found, numbers = [f'<g stroke-width="{edge:.3g}">'], dict[tuple[int, ...], int]()
        whole = not spec_axes(spec)
        for i, j in product(range(rows), range(columns)):
            devices = grid.devices[i][j]
            colour = "w" if whole else f"p{numbers.setdefault(devices, len(numbers)) % _COLOURS}"
            found.append(
                f'<rect class="{colour}" x="{j * wide:.4g}" y="{i * high:.4g}" width="{wide:.4g}" height="{high:.4g}"/>'
            )
            if rows * columns <= _LABELS:
                text = holders(devices, self._mesh.size)
                points = min(16.0, 0.8 * high, 1.6 * wide / max(2, len(text)))
                if points < _LEGIBLE:
                    continue
                place = f'x="{(j + 0.5) * wide:.4g}" y="{(i + 0.5) * high:.4g}"'
                found.append(f'<text {place} font-size="{points:.3g}">{text}</text>')
        return "".join([*found, "</g>"])


# --- the module tree ---------------------------------------------------------------------------------------------


def tree(plan: Plan) -> Node:
    """The modules of a plan, equal numbered ones merged; ops outside any module are at the root."""
    root = Node("", "")
    nodes = {"": root}
    order = _own_contents(plan, nodes)
    for path in order:
        _node(nodes, path)
    return _joined(root)


def _own_contents(plan: Plan, nodes: dict[str, Node]) -> list[str]:
    """Fill in each module's own tensors and costs; return the paths in program order."""
    costs = plan.predicted.modules if plan.predicted is not None else ()
    states = states_of(plan)
    for title, tensors in (("", plan.parameters), ("buffer", plan.buffers)):
        for name, tensor in sorted(tensors.items(), key=lambda item: natural(item[0])):
            module, _, short = name.rpartition(".")
            _node(nodes, module).tensors.append(_tensor(plan.mesh, short, tensor, title or states.get(name, "")))
    for cost in costs:
        _charge(_node(nodes, OPTIMIZER if cost.phase == "optimizer" and not cost.module else cost.module), cost)
    for group in activation_groups(plan):
        _node(nodes, group.module).values.append(_values(plan.mesh, group.members, group.names))
    return list(nodes)


def _charge(node: Node, cost: ModuleCost) -> None:
    node.own.setdefault(cost.phase, Cost()).add(cost.compute_s, cost.communication_s, cost.collectives)


def _node(nodes: dict[str, Node], path: str) -> Node:
    if path not in nodes:
        above, _, label = path.rpartition(".")
        nodes[path] = Node(label, path)
        _node(nodes, above).children.append(nodes[path])
    return nodes[path]


def _joined(node: Node) -> Node:
    """The node with its equal numbered children merged."""
    node.children = sorted(
        (_joined(child) for child in node.children), key=lambda child: (child.label == OPTIMIZER, natural(child.label))
    )
    alike: dict[object, list[Node]] = {}
    for child in node.children:
        key: object = child.signature() if child.label.isdecimal() else ("one", child.label)
        alike.setdefault(key, []).append(child)
    node.children = [_one(members) for members in alike.values()]
    return node


def _one(members: Sequence[Node]) -> Node:
    """Merge equal modules, summing their costs."""
    first, *others = members
    for other in others:
        _add(first, other)
    if others:
        first.label = ranges([int(node.label) for node in members])
        above = first.path.rpartition(".")[0]
        first.path = f"{above}.{first.label}" if above else first.label
    return first


def _add(into: Node, other: Node) -> None:
    into.members += other.members
    for phase, cost in other.own.items():
        into.own.setdefault(phase, Cost()).add(cost.compute_s, cost.communication_s, cost.totals())
    for mine, theirs in zip(into.children, other.children, strict=True):
        _add(mine, theirs)


def _tensor(mesh: Mesh, name: str, tensor: TensorPlan, note: str = "") -> TensorRow:
    return TensorRow(
        name,
        f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]",
        tensor.spec,
        _reads(tensor.copies),
        shard_bytes(tensor.shape, tensor.dtype, tensor.spec, mesh),
        note,
    )


def _values(mesh: Mesh, members: Sequence[ActivationPlan], names: str) -> TensorRow:
    first = members[0]
    types = dict.fromkeys(f"{each.dtype}[{','.join(map(str, each.shape))}]" for each in members)
    shown = ", ".join(list(types)[:2]) + (f" and {len(types) - 2} more" if len(types) > 2 else "")
    return TensorRow(names, shown, first.spec, _reads(first.copies), None)


def _reads(copies: Iterable[Copy]) -> tuple[Spec, ...]:
    return tuple(dict.fromkeys(copy.spec for copy in copies))


def shard_bytes(shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> int:
    """Bytes of a tensor on one device."""
    return math.ceil(math.prod(mesh.shard_shape(shape, spec)) * dtype_bytes(dtype))


# --- totals ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A segment of a bar: label, size, colour."""

    name: str
    amount: float
    colour: str


def _parts(plan: Plan) -> list[Part]:
    """Segments of the step time: compute and communication, per phase where known."""
    predicted = plan.predicted
    if predicted is None:
        return []
    if not predicted.modules:
        return [Part("compute", predicted.compute_s, "c1"), Part("communication", predicted.communication_s, "m1")]
    found: dict[tuple[str, str], float] = {}
    for cost in predicted.modules:
        for kind, seconds in (("compute", cost.compute_s), ("communication", cost.communication_s)):
            found[cost.phase, kind] = found.get((cost.phase, kind), 0.0) + seconds
    letters = {"compute": "c", "communication": "m"}
    return [
        Part(f"{name}: {kind}", found[phase, kind], f"{letter}{number}")
        for number, (phase, name) in enumerate(PHASES)
        for kind, letter in letters.items()
        if found.get((phase, kind))
    ]


@dataclass(frozen=True)
class CollectiveRow:
    """A kind of collective over some axes, and the modules that cause most of it."""

    total: CollectiveTotal
    where: tuple[str, ...]


def _collectives(plan: Plan) -> list[CollectiveRow]:
    if plan.predicted is None:
        return []
    causes: dict[tuple[str, AxisGroup], dict[str, int]] = {}
    for cost in plan.predicted.modules:
        for each in cost.collectives:
            name = _numberless(cost.module) or (OPTIMIZER if cost.phase == "optimizer" else "outside modules")
            of = causes.setdefault((each.kind, each.axes), {})
            of[name] = of.get(name, 0) + each.bytes
    rows = []
    for total in sorted(plan.predicted.collectives, key=lambda each: -each.bytes):
        most = sorted(causes.get((total.kind, total.axes), {}).items(), key=lambda item: (-item[1], item[0]))
        rows.append(CollectiveRow(total, tuple(f"{name} {size(count)}" for name, count in most[:3])))
    return rows


def _numberless(module: str) -> str:
    """`layers.*.mlp`: the path with `*` for its numbers."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def _memory(plan: Plan) -> list[Part]:
    """Memory per device: arguments by role, and the rest of the predicted peak."""
    if plan.predicted is None:
        return []
    sections = (
        ("parameters", plan.parameters, "c1"),
        ("optimizer state", plan.optimizer_state, "c2"),
        ("buffers", plan.buffers, "c3"),
        ("inputs", plan.inputs, "m3"),
    )
    found = [
        Part(name, sum(shard_bytes(each.shape, each.dtype, each.spec, plan.mesh) for each in tensors.values()), colour)
        for name, tensors, colour in sections
    ]
    rest = plan.predicted.peak_memory_bytes - sum(part.amount for part in found)
    found.append(Part("activations, gathered weights and temporaries at the peak", max(0.0, rest), "m1"))
    return [part for part in found if part.amount]


# --- what is not split, and why ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Undivided:
    """Tensors that some mesh axis does not split.

    Attributes:
        name: of the tensor, with `*` for numbers where several are equal.
        members: number of tensors it stands for.
        idle: the axes that do not split it.
        device_bytes: per device, summed.
        saved_bytes: saving per device if they were also split evenly over the idle axes.
        why: the reason, in words.
    """

    name: str
    members: int
    type: str
    spec: Spec
    idle: tuple[str, ...]
    device_bytes: int
    saved_bytes: int
    why: str


def undivided(plan: Plan, explanations: Sequence[Explanation] = ()) -> list[Undivided]:
    """Parameters, buffers and inputs not split over the whole mesh, with the reason, largest first."""
    explained = {each.tensor: each for each in explanations}
    found: dict[tuple[str, str, Spec, str], list[tuple[str, TensorPlan]]] = {}
    for section in (plan.parameters, plan.buffers, plan.inputs):
        for name, tensor in section.items():
            if tensor.shape and _idle(plan.mesh, tensor.spec):
                kind = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
                why = _why(plan, name, tensor, explained)
                found.setdefault((_numberless(name), kind, tensor.spec, why), []).append((name, tensor))
    rows = []
    for (name, kind, spec, why), members in found.items():
        (first, tensor), count = members[0], len(members)
        idle = _idle(plan.mesh, spec)
        held = count * shard_bytes(tensor.shape, tensor.dtype, spec, plan.mesh)
        saved = held - held // plan.mesh.ways(idle)
        rows.append(Undivided(name if count > 1 else first, count, kind, spec, idle, held, saved, why))
    return sorted(rows, key=lambda row: (-row.saved_bytes, row.name))[:_MAX_LISTED_ROWS]


def _idle(mesh: Mesh, spec: Spec) -> tuple[str, ...]:
    used = spec_axes(spec)
    return tuple(name for name in mesh.axis_names if name not in used and mesh.axis_size(name) > 1)


def _why(plan: Plan, name: str, tensor: TensorPlan, explained: Mapping[str, Explanation]) -> str:
    if name in plan.options.hints:
        return "a hint asked for it"
    if name in explained:
        idle = set(_idle(plan.mesh, tensor.spec))
        other = next(
            (each for each in explained[name].alternatives if each.overlapped_s and spec_axes(each.spec) & idle), None
        )
        if other is not None and other.overlapped_s is not None and plan.predicted is not None:
            more = other.overlapped_s - plan.predicted.overlapped_s
            return f"the best plan that splits it so, {layout(other.spec)}, takes {duration(more)} more"
    ways = {axis: plan.mesh.axis_size(axis) for axis in _idle(plan.mesh, tensor.spec)}
    left = plan.mesh.shard_shape(tensor.shape, tensor.spec)
    fit = [axis for axis, parts in ways.items() if any(dim % parts == 0 for dim in left)]
    if not fit:
        return f"none of its dims is a multiple of what {' or '.join(ways)} would split it into"
    if plan.solver is None or plan.solver.overruled is not None:
        return "whoever wrote the plan did not split it further"
    if plan.solver.status == "optimal":
        return "no plan that splits it further takes less time, in the cost model"
    return "no better plan was found that splits it further, in the cost model"


def _unruled(plan: Plan) -> list[tuple[str, int, str, float, str]]:
    """Ops without a rule: kind, number, reason, seconds, modules; most expensive first."""
    found: dict[tuple[str, str], list[Any]] = {}
    for each in plan.replicated_ops:
        entry = found.setdefault((each.op, each.reason), [0, 0.0, {}])
        entry[0] += 1
        entry[1] += each.cost_s
        entry[2].setdefault(_numberless(each.module))
    rows = [
        (op, count, reason, seconds, ", ".join(list(where)[:4]))
        for (op, reason), (count, seconds, where) in found.items()
    ]
    return sorted(rows, key=lambda row: -row[3])


def _at_dots(text: str) -> Markup:
    """Allow line breaks after the dots of names, not of numbers."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<!\d)\.|\.(?!\d)", ".<wbr>", str(escape(text))))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g}" if whole else "0"
