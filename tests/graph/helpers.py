"""Programs and graphs for tests, from StableHLO text or from jax functions, without PyTorch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.graph.ops import Graph, Op
from autoshard.program import Argument, ArgumentRole, AtenOp, Output, Program
from autoshard.stablehlo.reader import build_graph

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def program_from_text(
    text: str,
    roles: Sequence[ArgumentRole] | None = None,
    ops: Sequence[AtenOp] = (),
    kind: str = "train",
    updates: Mapping[int, int] | None = None,
) -> Program:
    """A Program of a StableHLO module in text form; arguments are `arg<i>`, parameters unless `roles` differs.

    `updates`: result -> the argument that it takes the place of.
    """
    bare = Program(kind, "torch_xla", {}, (), text.encode(), (), (), tuple(ops))
    graph = build_graph(bare)
    roles = roles or ["parameter"] * len(graph.arguments)
    arguments = tuple(
        Argument(f"arg{i}", role, graph.ops[i].results[0]) for i, role in zip(graph.arguments, roles, strict=True)
    )
    outputs = []
    for i, value in enumerate(graph.outputs):
        updated = (updates or {}).get(i)
        name, role = (f"out{i}", "output") if updated is None else (f"arg{updated}", roles[updated])
        outputs.append(Output(name, role, graph.type_of(value), updated))
    return dataclasses.replace(bare, arguments=arguments, outputs=tuple(outputs))


def graph_from_text(text: str, **kwargs: Any) -> Graph:
    """The Graph of a StableHLO module in text form."""
    return build_graph(program_from_text(text, **kwargs))


def graph_of(function: Callable[..., Any], *arguments: Any, updates: Mapping[int, int] | None = None) -> Graph:
    """The Graph of a jax function of these (abstract or concrete) arrays; `updates` as in `program_from_text`."""
    import jax

    return graph_from_text(jax.jit(function, keep_unused=True).lower(*arguments).as_text(), updates=updates)


def only(graph: Graph, kind: str) -> Op:
    """The one op of this kind."""
    (op,) = [op for op in graph.ops if op.kind == kind]
    return op
