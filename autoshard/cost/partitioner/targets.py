"""The rules of each target family for collectives."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.cost.machine.targets import Target
from autoshard.cost.partitioner.collective_rules import CollectiveRules
from autoshard.cost.partitioner.tpu import TpuCollectiveRules

COLLECTIVE_RULES: Mapping[Target, CollectiveRules] = {
    "cpu": CollectiveRules(),
    "gpu": CollectiveRules(),
    "tpu": TpuCollectiveRules(),
}
