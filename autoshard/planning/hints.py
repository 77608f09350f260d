"""The user's own sharding decisions: hints by name, and annotations on the model's tensors (`mark_sharding`).

`keep` selects those that constrain the plan, as XLA's auto-sharding does (`AutoShardingOption::PreserveShardingsType`):
`all`; `io`, those of the program's arguments only; `none`, to see what they cost.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from itertools import product
from math import prod

from autoshard.graph.ops import Graph, Value
from autoshard.manual import subtree_outputs
from autoshard.mesh import Mesh, Spec, format_spec
from autoshard.plans.value import Keep
from autoshard.program import Program
from autoshard.stablehlo.annotate import gspmd_sharding
from autoshard.strategies.allowed import argument_specs


def kept(program: Program, mesh: Mesh, hints: Mapping[str, Spec], keep: Keep) -> dict[str, Spec]:
    """The hints that constrain the plan: those given, else the annotation that a tensor carries.

    Hints by axes of one device are dropped: these split nothing.

    Raises:
        ValueError: an annotation is not expressible by axes of the mesh.
    """
    if keep == "none":
        return {}
    names = {argument.name: argument.type.shape for argument in program.arguments if argument.role != "scalar"}
    found = {
        name: spec_of(text, len(names[name]), mesh, name)
        for name, text in program.annotated.items()
        if name in names and name not in hints
    }
    found.update((name, spec) for name, spec in hints.items() if keep == "all" or name in names)
    alone = {axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size == 1}
    return {
        name: tuple(tuple(axis for axis in dim if axis not in alone) for dim in spec)
        for name, spec in sorted(found.items())
    }


def value_named(graph: Graph, name: str) -> Value | None:
    """Resolve a name to a value: an argument's name, a module's path (its output), `op12`, `op12.1`."""
    for op, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        if argument.name == name and argument.role != "scalar":
            return Value(op)
    if numbered := re.fullmatch(r"op(\d+)(?:\.(\d+))?", name):
        return graph.aten_outputs.get((int(numbered[1]), int(numbered[2] or 0)))
    return subtree_outputs(graph).get(name)


def split(graph: Graph, hints: Mapping[str, Spec]) -> tuple[dict[str, Spec], dict[Value, Spec]]:
    """Separate hints for arguments, by name, from hints for values inside the program.

    Raises:
        ValueError: a name that nothing in the program has; suggests similar ones.
    """
    arguments = {argument.name for argument in graph.program.arguments if argument.role != "scalar"}
    inside: dict[Value, Spec] = {}
    for name, spec in hints.items():
        if name in arguments:
            continue
        value = value_named(graph, name)
        if value is None:
            near = difflib.get_close_matches(name, arguments, n=3)
            raise ValueError(
                f"hint {name}={format_spec(spec)}: the program has no parameter, buffer, input or optimizer state of "
                f"that name" + (f"; did you mean {', '.join(near)}?" if near else "")
            )
        inside[value] = spec
    return {name: spec for name, spec in hints.items() if name in arguments}, inside


# --- annotations that tensors carry ------------------------------------------------------------------------------


def spec_of(text: str, rank: int, mesh: Mesh, name: str) -> Spec:
    """Convert a GSPMD sharding of devices numbered row-major over `mesh` to a spec.

    Raises:
        ValueError: no spec expresses it; says what to do.
    """
    wanted = _tiles(text)
    if wanted is not None:
        for spec in argument_specs((mesh.size,) * rank, mesh):
            if _tiles(gspmd_sharding(spec, mesh)) == wanted:
                return spec
    shape = "x".join(map(str, mesh.shape))
    raise ValueError(
        f"{name} is annotated as {text}, which no axes of the {shape} mesh make of it: plan for the mesh that it was "
        "marked on, give it a hint, or leave annotations out with keep='none'"
    )


_TILED = re.compile(r"\{devices=\[([\d,]+)\](<=\[([\d,]+)\](?:T\(([\d,]+)\))?|[\d,]+)( last_tile_dim_replicate)?\}")


def _tiles(text: str) -> tuple[tuple[int, ...], tuple[frozenset[int], ...]] | None:
    """Tiles along each dim, and the devices that hold each tile, row-major; None for what is no tiling.

    Replicated is `((), ())`, whatever the rank.
    """
    if text.strip() == "{replicated}":
        return (), ()
    match = _TILED.fullmatch(text.strip())
    if match is None:
        return None
    dims = [int(size) for size in match[1].split(",")]
    devices = _devices(match)
    copies = dims.pop() if match[5] else 1
    if len(devices) != prod(dims) * copies:
        return None
    if prod(dims) == 1:
        return (), ()
    return tuple(dims), tuple(frozenset(devices[i : i + copies]) for i in range(0, len(devices), copies))


def _devices(match: re.Match[str]) -> list[int]:
    """Device ids of a tiling: a list, or an iota `<=[2,4]T(1,0)`, row-major numbers of a grid with permuted dims."""
    if match[3] is None:
        return [int(number) for number in match[2].split(",")]
    grid = [int(size) for size in match[3].split(",")]
    order = [int(dim) for dim in match[4].split(",")] if match[4] else list(range(len(grid)))
    found = []
    for place in product(*(range(grid[dim]) for dim in order)):
        at = dict(zip(order, place, strict=True))
        number = 0
        for dim, size in enumerate(grid):
            number = number * size + at[dim]
        found.append(number)
    return found
