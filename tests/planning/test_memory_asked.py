"""The figure that a refused memory limit names can be met."""

from __future__ import annotations

import re

import pytest
import torch

import autoshard
from autoshard.plans.value import NoPlanError


@pytest.mark.parametrize("device", ["tpu-v5e", "h100", "cpu"])
@pytest.mark.parametrize("layers", [1, 2])
def test_what_is_named_as_least_is_found_when_asked_for(device: str, layers: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))

    def planned(memory: float) -> autoshard.Plan:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return autoshard.plan(
            model, (torch.zeros(8, 16),), loss_fn=lambda y: y.square().mean(), optimizer=optimizer, mesh="2x4",
            device=device, memory=memory,
        )  # fmt: skip

    with pytest.raises(NoPlanError) as refused:
        planned(500)
    (named,) = re.findall(r"the least predicted of those tried is ([\d,]+)", str(refused.value))
    limit = int(named.replace(",", ""))
    assert planned(limit).predicted.peak_memory_bytes <= limit
