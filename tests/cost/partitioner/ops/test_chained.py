"""Gradients of a table that is looked up twice: one scatter or two, against XLA's GPU compiler."""

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import VerifyReport, compare_compiled
from autoshard.verify.targets import parse_target

pytest.importorskip("jax_plugins.xla_cuda12")


def compared(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], plan: str) -> VerifyReport:
    """A step of SGD under a plan by hand, on 8 H100."""
    program = autoshard.capture(
        model, inputs, loss_fn=lambda loss: loss, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="h100")
    annotations = manual.PLANS[plan](graph, mesh)
    module = annotate(program, graph, annotations, mesh)
    return compare_compiled(graph, annotations, mesh, parse_target("h100:8", 8), module)[0]


@pytest.mark.parametrize(("rows", "lookups", "merged"), [(512, 4096, False), (8192, 4096, False), (8192, 2048, True)])
def test_scatters_merge_where_their_updates_are_fewer_than_the_table(rows: int, lookups: int, merged: bool) -> None:
    """Concatenated updates are exchanged between devices: an all-to-all."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(rows, 128)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return (self.table(one) * torch.tanh(self.table(other))).pow(2).mean()

    inputs = (torch.randint(0, rows, (lookups,)), torch.randint(0, rows, (lookups,)))
    report = compared(Net(), inputs, "dp")
    assert ("all-to-all" in {row.kind for row in report.fidelity.rows if row.predicted_bytes}) == merged
    assert report.fidelity.value < 0.01


def test_lookups_of_one_and_of_many_rows_share_an_all_reduce() -> None:
    """A history of items and a target item: their scatters do not merge, but one adds to the other's result."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(8192, 128)

        def forward(self, history: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return torch.tanh((self.table(history).mean(1) * self.table(target)).sum(-1)).mean()

    inputs = (torch.randint(0, 8192, (256, 50)), torch.randint(0, 8192, (256,)))
    assert compared(Net(), inputs, "dp").fidelity.value < 0.01


def test_an_element_of_each_row_is_added_where_the_rest_lies() -> None:
    """A margin on a sample's own class (ArcFace): all-to-alls of all classes were predicted that no compiler makes."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = torch.nn.Linear(256, 256)
            self.classes = torch.nn.Parameter(torch.randn(8192, 256))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            cosines = torch.nn.functional.linear(self.hidden(x), self.classes)
            own = cosines.gather(1, labels[:, None])
            logits = cosines.scatter(1, labels[:, None], torch.cos(own + 0.5))
            return torch.nn.functional.cross_entropy(logits, labels)

    inputs = (torch.randn(512, 256), torch.randint(0, 8192, (512,)))
    assert compared(Net(), inputs, "fsdp").fidelity.value < 0.01
