"""How far off a plan's figures may be: `bars.toml`, of rows that nothing was fitted to (`benchmarks/bars.py`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from autoshard.cost.machine import cycles
from autoshard.cost.machine.device import Device

FACTOR_OF_TWO = 1.0
"""The bar of what no measurement was held against: an assumption."""


@dataclass(frozen=True)
class Bars:
    """Nine of ten true values lie between `figure / (1 + bar)` and `figure * (1 + bar)`.

    Attributes:
        step: bar of the step times.
        memory: bar of the peak memory, against what the target's compiler says.
        tie: two plans of one program whose step times differ by less are not told apart.
        level: what `step` rests on: `measured steps`, or `datasheet`, an assumption.
    """

    step: float
    memory: float
    tie: float
    level: str

    @classmethod
    def of_info(cls, info: Mapping[str, Any]) -> Bars | None:
        """Those that a plan was saved with; None of a plan without any."""
        known = info.get("bars")
        return None if known is None else cls(**{each.name: known[each.name] for each in fields(cls)})

    def as_info(self) -> dict[str, Any]:
        """For `Plan.info`."""
        return {name: round(each, 3) if isinstance(each, float) else each for name, each in asdict(self).items()}

    def step_text(self) -> str:
        """`± 20 % (measured steps)`."""
        return f"{bar_text(self.step)} ({self.level})"

    def tie_text(self) -> str:
        """What a tie is, as a sentence of a table's foot."""
        return f"Steps less than {self.tie:.0%} apart are a tie (~): measured ones order either way.".replace("%", " %")

    def tied(self, one_s: float, other_s: float) -> bool:
        """Whether two plans of one program are a tie, by their step times."""
        return max(one_s, other_s) <= (1 + self.tie) * min(one_s, other_s)


def bar_text(bar: float) -> str:
    """`± 20 %`, or `within a factor of 2`."""
    return f"± {bar:.0%}".replace("%", " %") if bar < FACTOR_OF_TWO else f"within a factor of {1 + bar:.2g}"


@lru_cache
def _document() -> dict[str, Any]:
    return tomllib.loads(resources.files("autoshard.cost.machine").joinpath("bars.toml").read_text())


def bars_of(device: Device, unmeasured: float) -> Bars:
    """The bars of a step on a device kind.

    Args:
        unmeasured: share of the step's seconds in kernels that none of the measured steps has.
    """
    known, target = _document(), device.target
    step = FACTOR_OF_TWO
    if device.measured or cycles.model_of(device) is not None:
        bars = known["step"][target]
        step = bars.get(device.kind, bars["all"])
    share = 1.0 if step == FACTOR_OF_TWO else unmeasured
    return Bars(
        step=(1 - share) * step + share * FACTOR_OF_TWO,
        memory=known["memory"][target],
        tie=known["tie"]["all"],
        level="measured steps" if share < 0.5 else "datasheet",
    )
