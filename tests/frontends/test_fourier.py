"""Fourier transforms as products with matrices that the step makes."""

from collections.abc import Callable, Iterable

import pytest
import torch

import autoshard
from autoshard.frontends.tracing.fourier import _roots
from autoshard.stablehlo.reader import build_graph


@pytest.mark.parametrize("size", [1, 3, 255, 4095, 4096])
def test_roots_of_unity_are_as_exact_as_float32(size: int) -> None:
    cos, sin = _roots(size, size, size // 2 + 1, torch.zeros(1))
    exact = torch.fft.fft(torch.eye(size, dtype=torch.complex128), dim=0)[:, : size // 2 + 1]
    assert torch.allclose(cos.double(), exact.real, atol=1e-6)
    assert torch.allclose(sin.double(), -exact.imag, atol=1e-6)


def test_roots_need_no_division_of_integers() -> None:
    """A TPU divides integers bit by bit: 4.4 of 7.3 ms of a convolution by transforms of 2,048."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x).abs()

    graph = build_graph(autoshard.capture(Net(), (torch.randn(4, 64),)))
    assert not [op for op in graph.ops if op.kind in ("remainder", "divide") and op.results[0].dtype.startswith("i")]


@pytest.mark.parametrize("window", [torch.hann_window, torch.kaiser_window], ids=lambda made: made.__name__)
def test_windows_are_made_on_the_host_where_torch_writes_them_out(window: Callable[..., torch.Tensor]) -> None:
    """Without torch_xla a model that makes a window ended in a RecursionError."""

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            return torch.stft(made, 8, 4, window=window(8, device=made.device), return_complex=True).abs()

    def train(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    program = autoshard.capture(
        Net(64, 64), (torch.randn(4, 64),), loss_fn=torch.sum, optimizer=train, frontend="torchax"
    )
    assert build_graph(program).outputs
