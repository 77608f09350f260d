"""What the user already decided: hints by name, and annotations that the model's tensors carry (`mark_sharding`).

`keep` says which of them hold, as XLA's own pass has it (`AutoShardingOption::PreserveShardingsType`): `all`; `io`,
those of the program's arguments, not of values inside it; `none`, to see what they cost without changing the program.
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
from autoshard.strategies.space import argument_specs


def kept(program: Program, mesh: Mesh, hints: Mapping[str, Spec], keep: Keep) -> dict[str, Spec]:
    """The hints that hold: those given, and for tensors without one, the annotation that they carry.

    An axis of one device splits nothing, so it is left out of what is asked for.

    Raises:
        ValueError: a tensor's annotation is no sharding by axes of the mesh.
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
    """The value that a name stands for: an argument's name, a module's path for what it returns, `op12`, `op12.1`."""
    for op, argument in zip(graph.arguments, graph.program.arguments, strict=True):
        if argument.name == name and argument.role != "scalar":
            return Value(op)
    if numbered := re.fullmatch(r"op(\d+)(?:\.(\d+))?", name):
        return graph.aten_outputs.get((int(numbered[1]), int(numbered[2] or 0)))
    return subtree_outputs(graph).get(name)


def split(graph: Graph, hints: Mapping[str, Spec]) -> tuple[dict[str, Spec], dict[Value, Spec]]:
    """Hints for arguments by name, and for values inside the program.

    Raises:
        ValueError: a name that nothing in the program has, with those that are near.
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
    """The spec on `mesh` that a GSPMD sharding of devices numbered row-major over it stands for.

    Raises:
        ValueError: there is none; says what to do.
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

    Not split at all is `((), ())`, whatever the rank.
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
    """The device ids of a tiling: listed, or `<=[2,4]T(1,0)`, row-major numbers of a grid whose dims are permuted."""
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
