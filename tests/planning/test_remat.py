"""What is recomputed, chosen together with the shardings."""

from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard.plans.value import NoPlanError

BLOCKS = 6


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(256), torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def planned(remat: str, memory: float | None) -> autoshard.Plan:
    with torch.device("meta"):
        model = Net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.empty(64, 1024, 256, device="meta", dtype=torch.bfloat16)
    given = {"mesh": (2,), "device": "a100-80gb", "loss_fn": loss, "optimizer": optimizer, "memory": memory}
    return autoshard.plan(model, x, **given, remat=remat)


@pytest.fixture(scope="module")
def uniform() -> dict[str, autoshard.Plan]:
    return {remat: planned(remat, None) for remat in ("none", "products", "full")}


def peak(plan: autoshard.Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.peak_memory_bytes


def step(plan: autoshard.Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.overlapped_s


def test_what_is_recomputed_takes_less_memory_and_longer(uniform: dict[str, autoshard.Plan]) -> None:
    assert peak(uniform["none"]) > peak(uniform["products"]) > peak(uniform["full"])
    assert step(uniform["none"]) < step(uniform["full"])
    assert uniform["full"].remat == f"all=blocks.0-{BLOCKS - 1}"
    assert uniform["none"].remat == "none"


def test_where_everything_fits_nothing_is_recomputed(uniform: dict[str, autoshard.Plan]) -> None:
    plan = planned("auto", 2 * peak(uniform["none"]))
    assert plan.remat == "none"
    assert plan.remat_search is not None
    assert len(plan.remat_search.tried) == 1


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_as_few_blocks_are_recomputed_as_fit(uniform: dict[str, autoshard.Plan], share: float) -> None:
    """The choice is never slower than the best uniform one within the limit."""
    limit = peak(uniform["full"]) + share * (peak(uniform["none"]) - peak(uniform["full"]))
    plan = planned("auto", limit)
    search = plan.remat_search
    assert search is not None
    assert peak(plan) <= limit
    best = min(step(each) for each in uniform.values() if peak(each) <= limit)
    assert step(plan) < best if share == 0.7 else step(plan) <= best
    assert step(plan) > step(uniform["none"])
    assert search.chosen == plan.remat
    assert search.bound is not None
    assert search.bound <= step(plan)
    assert {"none", search.chosen} <= {each.remat for each in search.tried}
    text = plan.to_json()
    again = autoshard.Plan.from_json(text)
    assert again == plan
    assert again.remat_search == search
    assert '"version": 2' in text
    assert f"Recomputed: all of blocks.0-{BLOCKS - 1}" in str(uniform["full"])
    assert "whatever is recomputed, a step is at most" in str(plan)


def test_where_nothing_fits_the_message_says_what_would(uniform: dict[str, autoshard.Plan]) -> None:
    with pytest.raises(NoPlanError, match=r"By estimate these would fit: \d+ devices, .*; 1/\d+ of the batch") as said:
        planned("full", peak(uniform["full"]) / 4)
    assert "remat='auto'" not in str(said.value)
    with pytest.raises(NoPlanError, match="remat='auto'"):
        planned("as-is", peak(uniform["full"]) / 4)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="remat is as-is, auto, none, products, full, not 'some'"):
        planned("some", None)
