"""The parts of devices add up to the experts of transformers, values and gradients."""

import numpy as np
import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from autoshard.experts.form import Form
from autoshard.experts.kernels import experts, gradient

T, K, E, D, F = 24, 2, 4, 8, 16


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    layer = MixtralExperts(config)
    for each in layer.parameters():
        torch.nn.init.normal_(each)
    x, weights = torch.randn(T, D, requires_grad=True), torch.rand(T, K, requires_grad=True)
    ids = torch.rand(T, E - 1).topk(K).indices  # the last expert has no token
    grad = torch.randn(T, D)
    y = layer(x, ids, weights)
    made = torch.autograd.grad(y, [x, weights, layer.gate_up_proj, layer.down_proj], grad)
    up = layer.gate_up_proj.reshape(E, 2, F, D)
    given = [each.detach().numpy() for each in (x, ids.int(), weights, up, layer.down_proj, grad)]
    made = [each.numpy() for each in made]
    made[2] = made[2].reshape(up.shape)
    return given, [y.detach().numpy(), *made]


@pytest.mark.parametrize(("t", "e", "f"), [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)])
def test_parts_add_up_to_transformers(reference, t, e, f):
    (x, ids, weights, up, down, grad), expected = reference
    found = [np.zeros_like(each) for each in expected]
    for i, j, h in np.ndindex(t, e, f):
        rows = slice(i * T // t, (i + 1) * T // t)
        own = slice(j * E // e, (j + 1) * E // e)
        hidden = slice(h * F // f, (h + 1) * F // f)
        part = (x[rows], ids[rows], weights[rows], up[own, :, hidden], down[own, :, hidden])
        found[0][rows] += experts(Form(), "cpu", *part, own.start)
        made = gradient(Form(), "cpu", part, grad[rows], own.start)
        places = (rows, rows, (own, slice(None), hidden), (own, slice(None), hidden))
        for whole, place, each in zip(found[1:], places, made, strict=True):
            whole[place] += each
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="one of silu"):
        Form("tanh")
