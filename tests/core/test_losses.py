"""Losses as the torchax frontend lowers them: torch's numbers, and torch_xla's ops."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import autoshard
from autoshard.stablehlo.reader import build_graph

ROWS, CLASSES = 6, 5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("single", [False, True])
def test_likelihoods_are_torchs(reduction, weighted, single):
    import jax
    import jax.numpy as jnp

    from autoshard.frontends.torchax.aten_losses import _nll_loss, _nll_loss_backward

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, CLASSES, generator=generator).log_softmax(-1)
    target = torch.tensor([0, 4, 2, -100, 1, 4])
    if single:
        x, target = x[0], target[0]
    weight = torch.rand(CLASSES, generator=generator) if weighted else None
    x.requires_grad_()
    loss = F.nll_loss(x, target, weight, reduction=reduction)
    grad = torch.rand(loss.shape, generator=generator)
    loss.backward(grad)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    given = [None if t is None else jnp.asarray(t.detach().numpy()) for t in (x, target, weight)]
    found, total = _nll_loss((jax.ShapeDtypeStruct(tuple(loss.shape), np.float32),), *given, number, -100)
    np.testing.assert_allclose(found, loss.detach().numpy(), rtol=1e-6, atol=1e-7)
    gradient = _nll_loss_backward(
        (jax.ShapeDtypeStruct(tuple(x.shape), np.float32),), jnp.asarray(grad.numpy()), *given, number, -100, total
    )
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-6, atol=1e-7)


def test_the_same_kinds_of_ops_as_through_torch_xla():
    pytest.importorskip("torch_xla")

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.layer(x).log_softmax(-1)

    sample = (torch.zeros(ROWS, 8), torch.zeros(ROWS, dtype=torch.long))
    kinds = []
    for frontend in ("torch_xla", "torchax"):
        program = autoshard.capture(Scores(), sample, loss_fn=F.nll_loss, frontend=frontend)
        graph = build_graph(program)
        loss = {op.index for op in program.ops if "nll_loss" in op.name}
        kinds.append(sorted(o.kind for o in graph.ops if o.aten in loss and o.kind not in ("constant", "reshape")))
    assert kinds[0] == kinds[1]
    assert "gather" not in kinds[1]
