"""Where PyTorch copies and torch_xla does not: refused where it makes a difference, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import CaptureError

FRONTENDS = ("torch_xla", "torchax")
Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.layer = body, nn.Linear(8, 8)
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(32.0).view(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))


def written(h: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    copied.mul_(2.0)
    return copied.sum() + h


def base_written(m: Any, h: torch.Tensor) -> torch.Tensor:
    copied = h.t().contiguous()
    h.mul_(2.0)
    return copied.sum() + h


def by_index(m: Any, h: torch.Tensor) -> torch.Tensor:
    flat = h[:, :4].flatten()
    flat[3:9] = 0.0
    return flat.sum() + h


def by_a_view_of_it(m: Any, h: torch.Tensor) -> torch.Tensor:
    h.t().contiguous().view(-1)[:4].add_(1.0)
    return h


def spread_out(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h.expand(3, 16, 8).contiguous().mul_(2.0)


def windows(m: Any, h: torch.Tensor) -> torch.Tensor:
    rows = h.unfold(0, 2, 1).reshape(-1)
    rows[0] = 1.0
    return rows


def a_buffer(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * m.table.t().reshape(-1).mul_(2.0).mean()


def activation(m: Any, h: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu(h.view(4, 4, 8).transpose(0, 1).reshape(16, 8), inplace=True) + h


REFUSED: dict[str, tuple[Body, str]] = {
    "transposed": (lambda m, h: written(h, h.t().contiguous()), "contiguous"),
    "reshaped": (lambda m, h: written(h, h.t().reshape(-1)), "reshape"),
    "some columns": (lambda m, h: written(h, h[:, :4].contiguous()), "contiguous"),
    "some rows": (lambda m, h: written(h, h[::2].contiguous()), "contiguous"),
    "diagonal": (lambda m, h: written(h, h.diagonal().contiguous()), "contiguous"),
    "flattened": (lambda m, h: written(h, torch.flatten(h.view(4, 4, 8).transpose(0, 1))), "flatten"),
    "ravelled": (lambda m, h: written(h, h.T.ravel()), "ravel"),
    "data": (lambda m, h: written(h, h.data.t().contiguous()), "contiguous"),
    **{
        each.__name__: (each, name)
        for each, name in (
            (base_written, "contiguous"), (by_index, "flatten"), (by_a_view_of_it, "contiguous"),
            (spread_out, "contiguous"), (windows, "reshape"), (a_buffer, "reshape"), (activation, "reshape"),
        )
    },
}  # fmt: skip


def not_read_again(m: Any, h: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu(h.t().contiguous().add_(1.0), inplace=True)


def views_in_pytorch_too(m: Any, h: torch.Tensor) -> torch.Tensor:
    h[:8].contiguous().mul_(2.0)
    h.view(4, 4, 8).flatten(0, 1).reshape(-1)[:4].add_(1.0)
    return h


def written_before(m: Any, h: torch.Tensor) -> torch.Tensor:
    h.mul_(2.0)
    return h.t().contiguous().sum() + h


FINE: dict[str, Body] = {
    "cloned": lambda m, h: written(h, h.t().clone().contiguous()),
    "another tensor": lambda m, h: written(h, (h.t() + 1.0).contiguous()),
    "a dim of one": lambda m, h: written(h.sum(), h[:, None].transpose(1, 2).contiguous()),
    **{each.__name__: each for each in (not_read_again, views_in_pytorch_too, written_before)},
}


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_pytorch_makes_into_a_copy_is_refused(name: str, frontend: str) -> None:
    body, function = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"write \.clone\(\) in front of \.{function}\(\)") as raised:
        autoshard.capture(Net(body), torch.zeros(16, 8), loss_fn=torch.sum, frontend=frontend)
    assert "test_copies.py:" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("name", FINE)
def test_what_makes_no_difference_is_captured(name: str, frontend: str) -> None:
    assert autoshard.capture(Net(FINE[name]), torch.zeros(16, 8), loss_fn=torch.sum, frontend=frontend).ops


def test_another_memory_format() -> None:
    """torchax copies there, as PyTorch does."""

    def body(m: Any, h: torch.Tensor) -> torch.Tensor:
        return written(h, h.view(2, 4, 4, 4).contiguous(memory_format=torch.channels_last))

    with pytest.raises(CaptureError, match=r"\.contiguous\(\)"):
        autoshard.capture(Net(body), torch.zeros(16, 8), loss_fn=torch.sum, frontend="torch_xla")
