"""Option types of the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import click

from autoshard.mesh import Mesh, Spec, parse_spec
from autoshard.quantities import parse_bytes

T = TypeVar("T")


class Number(click.FloatRange):
    """A number within limits; NaN is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The option's number."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number", param, ctx)
        return found


SECONDS = Number(0, min_open=True)
SEED_RANGE = click.IntRange(0, 2**31 - 2)
"""Solvers store it in 32 bits."""


def parse_hint(text: str) -> tuple[str, Spec]:
    """`transformer.wte.weight=[model],[]` as a name and a spec.

    Raises:
        ValueError: anything else.
    """
    name, equals, spec = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"a hint is written name=[axes],[axes], one pair of brackets per dim, not {text!r}")
    return name.strip(), parse_spec(spec)


def parse_setting(text: str) -> tuple[str, str]:
    """`n_layer=2` as a name and the text of its value.

    Raises:
        ValueError: anything else.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--set wants key=value, such as n_layer=2, not {text!r}")
    return name.strip(), value.strip()


def parse_limit(memory: str | None) -> float | Literal["device"] | None:
    """The bytes of `--memory`; by default the device kind's, None for `none`.

    Raises:
        ValueError: anything else.
    """
    if memory is None:
        return "device"
    return None if memory.lower() == "none" else parse_bytes(memory)


def pairs(kind: str, found: Sequence[tuple[str, T]]) -> dict[str, T]:
    """Names and values as a dict.

    Raises:
        ValueError: a name occurs twice with different values.
    """
    once: dict[str, T] = {}
    for name, value in found:
        if once.setdefault(name, value) != value:
            raise ValueError(f"{kind} for {name} is given twice, and differently")
    return once


def parse_mesh(
    shape: str | None, axes: str | None, devices: int | None, device: str | None, placement: str | None = None
) -> Mesh | None:
    """The mesh of `--mesh`, `--axes`, `--device` and `--placement`; None where the shape is left open.

    Raises:
        ValueError: none or both of `--mesh` and `--devices` (or a device with a topology), or no mesh.
    """
    if shape is None:
        for option, given in (("--axes names the axes", axes), ("--placement places the axes", placement)):
            if given is not None:
                raise ValueError(f"{option} of --mesh: give both")
        if devices is None and ":" not in (device or ""):
            raise ValueError("no mesh: pass --mesh 2x4, or --devices 8 to have every shape tried")
        return None
    if devices is not None:
        raise ValueError("give --mesh or --devices, not both")
    return Mesh.parse(shape, axes, device or "cpu", placement)
