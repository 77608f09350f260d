"""Seeds of a program's random numbers: what follows from one at capture follows from one in every step."""

from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard.lower.seeds import Seeds, apart, moved
from autoshard.stablehlo.reader import build_graph


@pytest.mark.parametrize("draws", [0, 1, 2, 77, 2**40 + 3, 2**64 - 1])
@pytest.mark.parametrize("one", [0, 101, 2**64 - 5])
def test_how_far_apart_two_numbers_are(one: int, draws: int) -> None:
    assert apart(one, moved(one, draws)) == draws
    assert moved(moved(one, draws), 2**64 - draws) == one


def test_the_sequence_is_that_of_torch_xla() -> None:
    pytest.importorskip("torch_xla")
    import torch_xla.core.xla_model as xla_model

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.nn.functional.dropout(x)
            xla_model.set_rng_state(xla_model.get_rng_state())
            return torch.nn.functional.dropout(x)

    xla_model.set_rng_state(101)  # what tests before this one drew does not count
    program = autoshard.capture(Net(), torch.zeros(4), frontend="torch_xla")
    seeds = Seeds(build_graph(program), 0)
    first, second = seeds.after
    assert seeds.after[second][1] in (3, 2**64 - 3)
    one, other = seeds.next_step(), seeds.next_step()
    assert one[first] != other[first]
    assert apart(int(one[first]), int(one[second])) == apart(int(other[first]), int(other[second]))
