"""Which sorts XLA's GPU compiler turns into top-k calls."""

import pytest
import torch

import autoshard
from autoshard.cost.partitioner.top_k import top_k_sorts
from autoshard.stablehlo.reader import build_graph


@pytest.mark.parametrize(
    ("sorts", "calls"),
    [
        (lambda x: x.topk(5, -1), 1),
        (lambda x: x.sort(-1, descending=True), 0),  # torch_xla writes a top-k of all
        (lambda x: x.argsort(-1), 0),
    ],
)
def test_a_sort_of_which_all_is_read_stays_a_sort(sorts, calls: int) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            return sorts(x)

    graph = build_graph(autoshard.capture(Net(), (torch.randn(16, 64),)))
    assert len(top_k_sorts(graph)) == calls
