"""Values that a step reads are those that follow from the sample inputs, constants, and weights that are there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.frontends.torch_xla.program import capture
from autoshard.program import Program

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
Body = Callable[[nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]


class Reading(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.body = body

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.body(self.linear, x, mask)


def captured(body: Body, optimizer: Any = None, **inputs: torch.Tensor) -> Program:
    x, mask = inputs.get("x", torch.randn(3, 4, 6)), inputs.get("mask", MASK)
    return capture(Reading(body), (x, mask), loss_fn=lambda out: out.square().mean(), optimizer=optimizer)


def written(linear: nn.Linear, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = linear(x)
    out = out.clone()
    out[mask > 0] = torch.ones(int(mask.sum()), 6, device=x.device) * out[0, 0, 0]
    return out


def rows_of_each(linear: nn.Linear, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.stack([linear(row[:count]).sum(0) for row, count in zip(x, mask.sum(1), strict=True)])


def repeated(linear: nn.Linear, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return linear(x[:, 0].repeat_interleave(mask.sum(1), 0))


def ends_of_rows(linear: nn.Linear, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As PyTorch Geometric writes cumulative sums."""
    ends = mask.new_empty(len(mask) + 1)
    ends[:1].zero_()
    torch.cumsum(mask.sum(1), 0, out=ends[1:])
    return linear(x) * int(ends[-1])


def finite_maxima(linear: nn.Linear, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers' RT-DETR guards against overflow behind its stem."""
    pooled = nn.functional.max_pool2d(mask[None].float(), 2, stride=1, padding=(1, 0))
    return linear(x) * (1.0 if torch.isfinite(pooled).all() else 2.0)


READS: list[tuple[Body, list[str]]] = [
    (ends_of_rows, ["6"]),
    (finite_maxima, ["True"]),
    (lambda linear, x, mask: linear(x) * (mask.new_empty(2).zero_().max() + mask[0].max()).item(), ["1"]),
    (lambda linear, x, mask: linear(x) * mask.max().item(), ["1"]),
    (lambda linear, x, mask: linear(x) if mask.any() else x, ["True"]),
    (lambda linear, x, mask: linear(x) * mask.sum(1).tolist()[1], ["[3, 1, 2]"]),
    (rows_of_each, ["3", "1", "2"]),
    (lambda linear, x, mask: linear(x) * int(torch.tensor([2, 3], device=x.device).sum() + mask.sum()), ["11"]),
]


@pytest.mark.parametrize(("body", "values"), READS)
def test_what_follows_from_inputs_is_known(body: Body, values: list[str]) -> None:
    reads = captured(body).reads
    assert [read.value for read in reads] == values
    assert all(read.follows_from == ("input",) for read in reads)


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (lambda linear, x, mask: linear(x)[mask > 0], 6),
        (lambda linear, x, mask: linear(x)[torch.where(mask > 0)], 6),
        (lambda linear, x, mask: linear(x).masked_select(mask.unsqueeze(-1) > 0), 36),
        (repeated, 6),
        (written, 3),
    ],
)
def test_shapes_follow_from_whole_numbers_of_the_inputs(body: Body, rows: int) -> None:
    program = captured(body)
    of_the_host = [a for a in program.arguments if a.role == "scalar" and a.type.shape]
    assert of_the_host, "positions are constants of the host"
    shapes = [type.shape for op in program.ops for type in op.outputs if op.phase == "forward"]
    assert any(shape and shape[0] == rows for shape in shapes)
    assert any(read.op in ("aten.nonzero.default", "aten.repeat_interleave.Tensor") for read in program.reads)


def test_weights_are_read_where_they_are() -> None:
    def body(linear: nn.Linear, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return linear(x) * linear.weight.abs().max().item()

    model = Reading(body)
    (read,) = capture(model, (torch.randn(3, 4, 6), MASK), loss_fn=torch.sum).reads
    assert read.follows_from == ("parameter",)
    assert float(read.value) == float(model.linear.weight.abs().max())
    with pytest.raises(CaptureError, match=r"follows from parameter linear\.weight, which has no values here"):
        capture(model.to("meta"), (torch.randn(3, 4, 6), MASK), loss_fn=torch.sum)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda linear, x, mask: linear(x) * torch.rand(3, device=x.device).sum().item(),
            "follows from random numbers",
        ),
        (lambda linear, x, mask: linear(x)[linear(x) > 0], "follows from .*parameters"),
        (lambda linear, x, mask: linear(x)[x > 0], "follows from .*no whole numbers"),
    ],
)
def test_what_changes_with_every_step_is_refused(body: Body, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(body)


def ring(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.last[m.place % 4] = x.mean((0, 1))
    m.place.add_(1)
    return m.linear(x) + m.last.mean(0)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (ring, "buffer place"),
        (lambda m, x: m.average(m.linear(x)), "buffer average.num_batches_tracked"),
        (lambda m, x: m.linear(x) / float(m.linear.weight.norm()), "parameter linear.weight"),
    ],
)
def test_a_read_of_what_the_step_changes_makes_it_right_once(forward: Any, said: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.average = nn.Linear(6, 6), nn.BatchNorm1d(4, momentum=None)
            self.register_buffer("last", torch.zeros(4, 6))
            self.register_buffer("place", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, x)

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1)

    once = capture(Changing(), torch.randn(3, 4, 6), loss_fn=torch.sum, optimizer=sgd).once
    assert f"reads the value of {said} " in once
    assert "the step changes it" in once


def test_values_that_are_the_same_in_every_step_are_not_noted() -> None:
    program = captured(lambda linear, x, mask: linear(x) * torch.arange(4, device=x.device).max().item())
    assert program.reads == ()


def test_a_value_does_not_change_which_program_it_is() -> None:
    def body(linear: nn.Linear, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return linear(x) * mask.sum().item()

    one, other = captured(body), captured(body, mask=MASK + 1)
    assert one.reads != other.reads
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.ASGD])
def test_optimizers_that_read_their_tensors(kind: Any) -> None:
    program = captured(lambda linear, x, mask: linear(x), optimizer=lambda p: kind(p, lr=0.01))
    assert any(output.role == "optimizer_state" for output in program.outputs)


def test_strides_that_overlap() -> None:
    program = captured(lambda linear, x, mask: linear(x).as_strided((5, 4, 6), (12, 6, 1)))
    assert program.reads == ()
    assert not [op for op in program.ops if "as_strided" in op.name]


def test_nothing_of_a_capture_outlives_it() -> None:
    gc.collect()
    before = _on_the_device()
    gc.disable()  # a placeholder that waits for the collector would be run by the next sync, and end the process
    try:
        captured(lambda linear, x, mask: linear(x) * mask.sum().item())
        after = _on_the_device()
    finally:
        gc.enable()
    assert after <= before


def _on_the_device() -> int:
    return sum(isinstance(each, torch.Tensor) and each.device.type == "xla" for each in gc.get_objects())
