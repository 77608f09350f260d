"""What each device computes of a mixture's experts, kernel by kernel (`experts/kernels.py`).

Rows are one per token and choice, of all experts: where experts are split, most of a device's rows are others'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.experts.dims import IDS, UP, biased, products
from autoshard.experts.form import FORWARD

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """A kernel.

    Attributes:
        reads, writes: names of operands, results (`form.py`) and of arrays in between.
        products: how many rows times hidden features times features it multiplies.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    products: int = 0


@dataclass(frozen=True)
class Stages:
    """The kernels in order.

    Attributes:
        between: name -> shape of what is neither operand nor result.
        share: of the op's FLOP on this device, that of one product.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    stages: tuple[Stage, ...]
    between: Mapping[str, Shape]
    share: float


def stages(kind: str, shapes: Sequence[Shape], *, apart: bool) -> Stages:
    """The kernels of an op.

    Args:
        shapes: of the local operands.
        apart: whether rows are put in the order of tokens before they are summed, and gradients of gates made before
            they are concatenated (TPU).
    """
    rows, (_, gates, hidden, features) = math.prod(shapes[IDS]), shapes[UP]
    has_bias = biased(kind, len(shapes))
    widths = {"rows": features, "grads": features, "made": features, "back": features, "slope": hidden}
    widths |= {"wide": gates * hidden, "of_wide": gates * hidden, "inner": hidden, "scaled": hidden, "of_weights": 1}
    widths |= {f"gate{number}": hidden for number in range(gates)}
    operands: tuple[str, ...] = ("x", "ids", "weights", "up", "down", *(["bias"] if has_bias else []))
    results: tuple[str, ...] = ("y",)
    wide = "wide bias ids" if has_bias else "wide"
    if kind == FORWARD:
        found = [
            _stage("x ids", "rows"), _stage("rows up", "wide", gates), _stage(wide, "inner"),
            _stage("inner down", "made", 1), *_summed("made", "weights ids", "y", apart),
        ]  # fmt: skip
    else:
        operands = (*operands, "grad")
        results = ("dx", "dweights", "dup", "ddown", *(["dbias"] if has_bias else []))
        gate = " ".join(f"gate{number}" for number in range(gates))
        found = [
            _stage("x ids", "rows"), _stage("grad ids", "grads"),
            _stage("rows up", "wide", gates), _stage("grads down", "slope", 1),
            *((
                _stage(f"{wide} slope weights", "of_weights scaled"), _stage(f"{wide} slope weights", gate),
                _stage(gate, "of_wide"),
            ) if apart else (
                _stage(wide, "inner"), _stage("slope inner weights", "of_weights scaled"),
                _stage(f"{wide} slope weights", "of_wide"),
            )),
            _stage("of_wide up", "made", gates), _stage("of_wide rows", "dup", gates),
            _stage("grads scaled", "ddown", 1), *_summed("made", "ids", "dx", apart),
            _stage("of_weights ids", "dweights"), *([_stage("of_wide ids", "dbias")] if has_bias else []),
        ]  # fmt: skip
    used = {name for stage in found for name in stage.writes} - set(results)
    of_up, of_down = products(kind)
    return Stages(
        operands, results, tuple(found), {name: (rows, widths[name]) for name in sorted(used)},
        1 / (of_up * gates + of_down),
    )  # fmt: skip


def between_elements(kind: str, shapes: Sequence[Shape], *, apart: bool) -> int:
    """Most elements of arrays in between that are live at once."""
    found = stages(kind, shapes, apart=apart)
    live = {
        name: [n for n, each in enumerate(found.stages) if name in each.reads + each.writes] for name in found.between
    }
    return max(
        sum(math.prod(found.between[name]) for name, used in live.items() if used[0] <= number <= used[-1])
        for number in range(len(found.stages))
    )


def _stage(reads: str, writes: str, products: int = 0) -> Stage:
    return Stage(tuple(reads.split()), tuple(writes.split()), products)


def _summed(made: str, others: str, result: str, apart: bool) -> list[Stage]:
    if apart:
        return [_stage(f"{made} ids", "back"), _stage(f"back {others}", result)]
    return [_stage(f"{made} {others}", result)]
