"""Decompositions that depend on arguments: numbers of PyTorch's op, and no op that the compilers take badly."""

import itertools

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.frontends.tracing import algebra, quantized, special
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


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rows", [False, True], ids=["whole", "rows"])
@pytest.mark.parametrize("on", [(1, 1), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_an_observer_averages_its_limits_as_torch_does(symmetric, rows, on, first):
    count = 6 if rows else 1
    for shift, (low, high) in itertools.product((-3, 0, 3), ((0, 127), (-128, 127), (0, 255))):
        torch.manual_seed(shift)
        limits = [-torch.rand(count), torch.rand(count)]
        if first:
            limits = [torch.full((count,), bound) for bound in (torch.inf, -torch.inf)]
        given = (
            torch.randn(6, 5) + shift, *map(torch.tensor, ([on[0]], [on[1]])), *limits,
            torch.full((count,), 0.1), torch.zeros(count, dtype=torch.int32), 0.01, low, high, 0, rows, symmetric,
        )  # fmt: skip
        theirs = torch.ops.aten._fused_moving_avg_obs_fq_helper_functional.default(*given)
        for ours, wanted in zip(quantized.observed(*given), theirs, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_an_observer_without_limits_asks_for_a_first_step():
    empty = torch.zeros(0)
    one = torch.ones(1)
    with pytest.raises(CaptureError, match="Run the model once"):
        quantized.observed(torch.zeros(6, 5), one, one, empty, empty, one, one, 0.01, 0, 127, 0, True, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_functions_at_their_poles_and_far_out(dtype):
    x = torch.cat(
        [torch.linspace(-5.3, 5, 1001), torch.logspace(-6, 6, 500), torch.tensor([0.0, -1, -2, 1, torch.inf])]
    )
    x = x.to(dtype)
    for ours, theirs in ((special.lgamma, torch.lgamma), (special.digamma, torch.digamma)):
        error = (ours(x) - theirs(x)).abs() / (1 + theirs(x).abs())
        same = (ours(x) == theirs(x)) | (ours(x).isnan() & theirs(x).isnan())
        assert float(torch.where(same, 0, error).max()) < 40 * torch.finfo(dtype).eps + 2e-14
    above = x[(x > 0) & x.isfinite()]
    for order in (1, 2, 3):
        torch.testing.assert_close(special.polygamma(order, above), torch.polygamma(order, above), rtol=1e-5, atol=0)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_integers_are_multiplied_without_a_dot(frontend):
    """libtpu has no dot of 64-bit integers, as BigBird's masks were."""

    class Masks(nn.Linear):
        def forward(self, x):
            mask = (x[0] > 0).to(torch.int64)
            return super().forward(x) * torch.einsum("il,ik->ilk", mask, mask).sum(-1)[..., :1]

    graph = build_graph(autoshard.capture(Masks(8, 8), torch.randn(2, 4, 8), frontend=frontend))
    dots = [op for op in graph.ops if op.kind == "dot_general"]
    assert dots
    assert all(op.results[0].dtype.startswith("f") for op in dots)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_rows_are_counted_beyond_what_bf16_counts(frontend):
    model = nn.Embedding(4, 8, scale_grad_by_freq=True).bfloat16()
    graph = build_graph(
        autoshard.capture(model, torch.zeros(4, 256, dtype=torch.int64), loss_fn=torch.sum, frontend=frontend)
    )
    counts = [op.results[0] for op in graph.ops if op.kind == "scatter" and op.results[0].shape == (4,)]
    assert [each.dtype for each in counts] == ["f32"]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_norms_are_differentiated_inside_functions(frontend):
    """As titans_pytorch's memories are, which are weights that learn in the forward pass."""

    class Learns(nn.Linear):
        def forward(self, x):
            def loss(weight):
                y = nn.functional.layer_norm(x @ weight, (8,), x[0], x[1])
                return nn.functional.group_norm(y[None, :, :, None], 2).square().sum()

            return x @ torch.func.grad(loss)(self.weight)

    assert autoshard.capture(Learns(8, 8), torch.randn(4, 8), loss_fn=torch.sum, frontend=frontend).ops
