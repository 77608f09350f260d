"""Functions of jax compiled for devices that are not there, beside what is predicted of them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh, Spec
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import VerifyReport, compare_compiled
from autoshard.verify.compile import Compiled
from autoshard.verify.targets import parse_target
from tests.graph.helpers import graph_of


def f32(*shape: int) -> object:
    """The type of an array of floats."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    """The type of an array of bfloat16."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def ids(*shape: int) -> object:
    """The type of an array of indices."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compiled_for(
    target: str,
    function: object,
    arguments: list[object],
    specs: list[Spec],
    updates: Mapping[int, int] | None = None,
    mesh: Mesh | None = None,
) -> tuple[VerifyReport, Compiled]:
    """A function of arguments with these shardings on a mesh, by default data 2 x model 4; nothing else is annotated.

    `updates`: result -> the argument that it takes the place of.
    """
    mesh = mesh or Mesh((2, 4), ("data", "model"), device=target.partition(":")[0])
    graph = graph_of(function, *arguments, updates=updates)
    annotations = Annotations({Value(op): spec for op, spec in zip(graph.arguments, specs, strict=True)})
    module = annotate(graph.program, graph, annotations, mesh)
    return compare_compiled(graph, annotations, mesh, parse_target(target), module)
