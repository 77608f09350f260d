"""What ReLUs leave for the backward pass on GPUs, beside what XLA's compiler does."""

from itertools import pairwise

import pytest
import torch

from tests.cost.peaks import peak_and_compiled

pytest.importorskip("jax_plugins.xla_cuda12")


class Frozen(torch.nn.Module):
    """A batch norm whose statistics are fixed, and a ReLU, as detection backbones have them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1, channels, 1, 1), 0.9))
        self.register_buffer("shift", torch.zeros(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.scale + self.shift)


def convolutions() -> tuple[torch.nn.Module, torch.Tensor]:
    """Each result is kept for the mask of its ReLU, beside the ReLU's own for the next kernel's gradient."""
    layers = [each for _ in range(4) for each in (torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), Frozen(64))]
    return torch.nn.Sequential(*layers), torch.randn(64, 64, 56, 56)


def perceptron() -> tuple[torch.nn.Module, torch.Tensor]:
    """Products apply the ReLU to what they read, so one array of a layer is kept."""
    sizes = (1024, 4096, 4096, 4096)
    layers = [each for a, b in pairwise(sizes) for each in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4096, 1024)).bfloat16(), torch.randn(32768, 1024).bfloat16()


@pytest.mark.parametrize("make", [convolutions, perceptron])
def test_masks_of_relus_are_of_what_the_relus_read(make) -> None:
    model, given = make()
    peak, compiled = peak_and_compiled("h100:8", model, (given,))
    assert peak == pytest.approx(compiled.memory.peak, rel=0.05)
