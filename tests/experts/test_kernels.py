"""The parts of devices add up to the experts of transformers, values and gradients."""

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from autoshard.experts.form import Form
from autoshard.experts.kernels import experts, gradient

T, K, E, D, F = 24, 2, 4, 8, 16


MIXTRAL = Form(), MixtralConfig, MixtralExperts
GPT_OSS = Form(scale=1.702, limit=7.0, shift=1.0), GptOssConfig, GptOssExperts


@pytest.fixture(scope="module", params=[MIXTRAL, GPT_OSS], ids=["mixtral", "gpt-oss"])
def reference(request):
    """Form, operands, gradient, and what transformers makes of them; gpt-oss without the biases of `down`."""
    torch.manual_seed(0)
    form, config_class, layer_class = request.param
    config = config_class(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    layer = layer_class(config)
    for name, each in layer.named_parameters():
        (torch.nn.init.zeros_ if name == "down_proj_bias" else torch.nn.init.normal_)(each)
    x, weights = torch.randn(T, D, requires_grad=True), torch.rand(T, K, requires_grad=True)
    ids = torch.rand(T, E - 1).topk(K).indices  # the last expert has no token
    grad = torch.randn(T, D)
    y = layer(x, ids, weights)
    of_layer = [layer.gate_up_proj, layer.down_proj]
    of_layer += [layer.gate_up_proj_bias] if form.limit else []
    made = [each.numpy() for each in torch.autograd.grad(y, [x, weights, *of_layer], grad)]
    given = [each.detach().numpy() for each in (x, ids.int(), weights, *of_layer)]
    for side, up in ((given, 3), (made, 2)):
        if form.limit:  # transposed, and interleaved
            side[up] = side[up].reshape(E, D, F, 2).transpose(0, 3, 2, 1)
            side[up + 1] = side[up + 1].transpose(0, 2, 1)
            side[up + 2] = side[up + 2].reshape(E, F, 2).transpose(0, 2, 1)
        side[up] = side[up].reshape(E, 2, F, D)
    return form, given, grad.numpy(), [y.detach().numpy(), *made]


@pytest.mark.parametrize(("t", "e", "f"), [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)])
def test_parts_add_up_to_transformers(reference, t, e, f):
    form, given, grad, expected = reference
    letters = ["tm", "tk", "tk", "egfd", "edf", "egf"][: len(given)]
    found = [np.zeros_like(each) for each in expected]
    for i, j, h in np.ndindex(t, e, f):
        own = {
            "t": slice(i * T // t, (i + 1) * T // t),
            "e": slice(j * E // e, (j + 1) * E // e),
            "f": slice(h * F // f, (h + 1) * F // f),
        }
        places = [tuple(own.get(letter, slice(None)) for letter in each) for each in letters]
        part = [each[place] for each, place in zip(given, places, strict=True)]
        rows, first = own["t"], own["e"].start
        found[0][rows] += experts(form, "cpu", part, first)
        made = gradient(form, "cpu", part, grad[rows], first)
        for whole, place, each in zip(found[1:], [places[0], *places[2:]], made, strict=True):
            whole[place] += each
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="one of silu"):
        Form("tanh")
