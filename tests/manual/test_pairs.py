"""Which products are column- and row-parallel: by what flows from one to the next, whatever they are called."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.manual.pairs import pairs
from autoshard.manual.roles import styles
from autoshard.stablehlo.reader import build_graph
from tests.manual import decoders

NAMES = {"meta": decoders.META, "transformers": decoders.HF, "own": decoders.OWN}
ATTENTION = {"q": "column", "k": "column", "v": "column", "o": "row"}
LATENT = {"q_down": "whole", "q_up": "column", "kv_down": "whole", "kv_up": "column", "o": "row"}
FEED_FORWARD = {"gate": "column", "up": "column", "down": "row"}


def graph_of(name, names=decoders.META):
    source = decoders.source(name, names)
    program = autoshard.capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    return build_graph(program)


def forward(model, *shape):
    return build_graph(autoshard.capture(model, torch.empty(shape, device="meta")))


def found(model, *shape):
    """Module path -> its style, of a forward pass on meta."""
    return {name.removesuffix(".weight"): style for name, style in styles(forward(model.to("meta"), *shape)).items()}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("name", decoders.DECODERS)
def test_pairs_of_decoders_are_found_under_any_names(name, names):
    graph = graph_of(name, names)
    style = styles(graph)
    expected = {f"{names['head']}.weight": "head"}
    for block in range(2):
        path = f"{names['blocks']}.{block}"
        for role, kind in (LATENT if name == "deepseek" else ATTENTION).items():
            expected[f"{path}.{names['attention']}.{names[role]}.weight"] = kind
        feed_forward = f"{path}.{names['ffn']}"
        if name == "mixtral" or (name == "deepseek" and block == 1):
            expected[f"{feed_forward}.router.weight"] = "whole"
            for role, kind in FEED_FORWARD.items():
                assert pairs(graph)[f"{feed_forward}.experts.{names[role]}"] == kind
            feed_forward += ".shared_experts"
        if name != "mixtral":
            expected |= {f"{feed_forward}.{names[role]}.weight": kind for role, kind in FEED_FORWARD.items()}
    assert style == expected


class OneKey(nn.Module):
    """Four queries to one key and value (multi-query attention)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (decoders.linear(64, width) for width in (64, 16, 16, 64))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 16)) for layer in (self.a, self.b, self.c))
        return self.d(decoders.attended(q, k, v))


def test_a_key_for_all_heads_stays_whole():
    assert found(OneKey(), 8, 16, 64) == {"a": "column", "b": "whole", "c": "whole", "d": "row"}


class Packed(nn.Module):
    """Queries, keys and values in one product; gate and up in another."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            decoders.linear(*shape) for shape in ((64, 192), (64, 64), (64, 256), (128, 64))
        )
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)) for part in self.a(x).chunk(3, dim=-1))
        x = x + self.b(decoders.attended(q, k, v))
        gate, up = self.c(self.norm(x)).chunk(2, dim=-1)
        return x + self.d(nn.functional.gelu(gate) * up)


def test_packed_products_are_columns():
    assert found(Packed(), 8, 16, 64) == {"a": "column", "b": "row", "c": "column", "d": "row"}


class Modulated(nn.Module):
    """A norm scaled by what a product makes of a condition, as in diffusion transformers."""

    def __init__(self):
        super().__init__()
        self.condition, self.a, self.b = decoders.linear(64, 64), decoders.linear(64, 256), decoders.linear(256, 64)
        self.norm = nn.LayerNorm(64, elementwise_affine=False)

    def forward(self, x):
        scale = self.condition(nn.functional.silu(x[:, :1]))
        return x + self.b(nn.functional.gelu(self.a(self.norm(x) * (1 + scale))))


def test_what_modulates_a_norm_is_no_column():
    assert found(Modulated(), 8, 16, 64) == {"condition": "whole", "a": "column", "b": "row"}


class LowRank(nn.Module):
    """A feed-forward layer whose first product has a product of two narrow ones beside it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = decoders.linear(64, 256), decoders.linear(256, 64)
        self.narrow, self.wide = decoders.linear(64, 8), decoders.linear(8, 256)

    def forward(self, x):
        return self.b(torch.relu(self.a(x) + 0.5 * self.wide(self.narrow(x))))


def test_two_products_with_nothing_nonlinear_between_them_are_no_pair():
    assert found(LowRank(), 8, 16, 64) == {"a": "column", "b": "row", "narrow": "whole", "wide": "column"}


class Normed(nn.Module):
    """Queries and keys behind norms over all heads at once, named as Meta does."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (decoders.linear(64, 64) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(64), nn.RMSNorm(64)

    def forward(self, x):
        q, k, v = self.q_norm(self.wq(x)), self.k_norm(self.wk(x)), self.wv(x)
        return self.wo(decoders.attended(*(each.unflatten(-1, (4, 16)) for each in (q, k, v))))


def test_names_speak_where_a_norm_mixes_the_features_inside_a_pair():
    assert pairs(forward(Normed().to("meta"), 8, 16, 64)) == {}
    assert found(Normed(), 8, 16, 64) == {"wq": "column", "wk": "column", "wv": "column", "wo": "row"}


class TwoGrids(nn.Module):
    """A feed-forward layer over the sum of two grids of as many cells, neither's sides dividing the other's."""

    def __init__(self):
        super().__init__()
        self.up, self.down = decoders.linear(6, 64), decoders.linear(64, 6)

    def forward(self, wide, high):
        return self.down(torch.relu(self.up(wide.flatten(1) + high.flatten(1))))


def test_grids_whose_sides_do_not_divide_each_other_are_one_mixed_dim():
    inputs = torch.empty(8, 2, 3, device="meta"), torch.empty(8, 3, 2, device="meta")
    graph = build_graph(autoshard.capture(TwoGrids().to("meta"), inputs))
    assert pairs(graph) == {"up.weight": "column", "down.weight": "row"}
