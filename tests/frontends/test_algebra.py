"""Decompositions that depend on arguments: numbers of PyTorch's op, and no op that the compilers take badly."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.frontends.tracing import algebra
from autoshard.stablehlo.reader import build_graph
from tests.conftest import FRONTENDS


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 5), 1), ((3, 4, 5), -1), ((6,), 0)])
def test_one_element_per_row_is_put_as_scatter_puts_it(shape, dim):
    x = torch.randn(shape)
    one = [1 if at == dim % len(shape) else size for at, size in enumerate(shape)]
    index, src = torch.randint(0, shape[dim], one), torch.randn(one)
    assert algebra.puts_one(x, dim, index, src)
    torch.testing.assert_close(algebra.put(x, dim, index, src), torch.scatter(x, dim, index, src), rtol=0, atol=0)


def test_fewer_rows_or_more_elements_are_left_to_scatter():
    x = torch.zeros(3, 4)
    for index in (torch.zeros(2, 1, dtype=torch.long), torch.zeros(3, 2, dtype=torch.long)):
        assert not algebra.puts_one(x, 1, index, torch.ones(index.shape))
    assert not algebra.puts_one(torch.zeros(()), 0, torch.zeros((), dtype=torch.long), torch.ones(()))


class Shifted(nn.Module):
    """A softmax written out, the gradient of whose maximum goes back through `max`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return torch.softmax(y - y.max(-1, keepdim=True).values, -1).square().mean()


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_gradient_of_a_maximum_is_elementwise(frontend):
    model = Shifted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = autoshard.capture(
        model, torch.zeros(4, 8), loss_fn=lambda loss: loss, optimizer=optimizer, frontend=frontend
    )
    assert not any(op.kind == "scatter" for op in build_graph(program).ops)
