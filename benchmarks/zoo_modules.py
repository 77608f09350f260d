"""Modules and functions of torch.nn that no other entry of `coverage.py` uses, each in a small net that trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.zoo_entry import BATCH, SEQ, WIDTH, classes, entry, floats, mean_square, tokens, uniform

SIDE = 16


class Lambda(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)[0]


def pictures(channels: int = 8) -> Tensor:
    return floats(BATCH, channels, SIDE, SIDE)


# Recurrent nets.


@entry
def rnn_relu() -> Any:
    model = nn.Sequential(First(nn.RNN(WIDTH, WIDTH, 2, nonlinearity="relu", batch_first=True)), nn.Linear(WIDTH, 4))
    return model, (floats(BATCH, 6, WIDTH),), mean_square


@entry
def lstm_with_projections() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, proj_size=16, batch_first=True)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
            return self.lstm(x, (h, c))[0]

    return Net(), (floats(BATCH, 6, WIDTH), floats(1, BATCH, 16), floats(1, BATCH, WIDTH)), mean_square


@entry
def cells_of_three_kinds() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.rnn = nn.GRUCell(WIDTH, WIDTH), nn.RNNCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            a = b = torch.zeros_like(x[:, 0])
            for t in range(x.shape[1]):
                a = self.gru(x[:, t], a)
                b = self.rnn(a, b)
            return b

    return Net(), (floats(BATCH, 5, WIDTH),), mean_square


@entry
def sequence_to_sequence_with_attention() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, WIDTH)
            self.encoder, self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRUCell(2 * WIDTH, WIDTH)
            self.score, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory, last = self.encoder(self.embed(source))
            state, losses = last[0], []
            for t in range(target.shape[1] - 1):
                weights = torch.softmax(torch.einsum("bth,bh->bt", memory, self.score(state)), -1)
                context = torch.einsum("bt,bth->bh", weights, memory)
                state = self.decoder(torch.cat([self.embed(target[:, t]), context], -1), state)
                losses.append(F.cross_entropy(self.head(state), target[:, t + 1]))
            return torch.stack(losses).mean()

    return Net(), (tokens(BATCH, 6, below=64), tokens(BATCH, 5, below=64)), None


# Embeddings.


@entry
def bags_of_largest() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(128, WIDTH, mode="max"), nn.Linear(WIDTH, 8)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.bag(words))

    return Net(), (tokens(BATCH, 5, below=128), classes()), F.cross_entropy


@entry
def bags_by_offsets() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(128, WIDTH, mode="sum", padding_idx=3)
            self.head = nn.Linear(WIDTH, 8)

        def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
            return self.head(self.bag(words, offsets))

    return Net(), (tokens(40, below=128), torch.arange(0, 40, 5), classes()), F.cross_entropy


@entry
def embedding_with_padding() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(128, WIDTH, padding_idx=2)
            self.head = nn.Linear(WIDTH, 8)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            x = self.embed(words) * mask.unsqueeze(-1)
            return self.head(x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))

    return Net(), (tokens(BATCH, SEQ, below=128), uniform(BATCH, SEQ).gt(0.3), classes()), F.cross_entropy


# Attention.


@entry
def multihead_attention_of_all_kinds() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.MultiheadAttention(WIDTH, 4, batch_first=True, add_bias_kv=True)
            self.other = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=48, bias=False)

        def forward(self, x: Tensor, keys: Tensor, values: Tensor, padded: Tensor) -> Tensor:
            made, weights = self.own(x, x, x, key_padding_mask=padded)
            y, _ = self.other(made.transpose(0, 1), keys, values, need_weights=False)
            return y.square().mean() + weights.square().sum(-1).mean()

    padded = torch.arange(SEQ).expand(BATCH, SEQ) > 12
    return Net(), (floats(BATCH, SEQ, WIDTH), floats(9, BATCH, 32), floats(9, BATCH, 48), padded), None


@entry
def decoder_layers() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(
                WIDTH, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(WIDTH))

        def forward(self, target: Tensor, memory: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
            return self.decoder(target, memory, tgt_mask=mask, tgt_is_causal=True)

    return Net(), (floats(BATCH, SEQ, WIDTH), floats(BATCH, 9, WIDTH)), mean_square


@entry
def encoder_with_padding() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padded)

    return Net(), (floats(BATCH, SEQ, WIDTH), torch.arange(SEQ).expand(BATCH, SEQ) > 12), mean_square


@entry
def rotary_and_relative_positions() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.relative = nn.Embedding(2 * SEQ - 1, 4)
            self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            at = torch.arange(x.shape[1], device=x.device)
            angles = at.unsqueeze(-1) * 100 ** (-torch.arange(0, 16, 2, device=x.device) / 16)
            cos, sin = angles.cos(), angles.sin()

            def turned(t: Tensor) -> Tensor:
                a, b = t[..., ::2], t[..., 1::2]
                return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

            away = at.unsqueeze(0) - at.unsqueeze(1)
            bias = self.relative(away + SEQ - 1).permute(2, 0, 1) - self.slopes.view(-1, 1, 1) * away.abs()
            made = F.scaled_dot_product_attention(turned(q), turned(k), v, attn_mask=bias)
            return self.out(made.transpose(1, 2).flatten(2))

    return Net(), (floats(BATCH, SEQ, WIDTH),), mean_square


# Images.


@entry
def local_response_norm() -> Any:
    model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.LocalResponseNorm(5), nn.ReLU(), nn.Conv2d(32, 8, 1))
    return model, (pictures(), pictures()), F.mse_loss


@entry
def pixel_shuffles() -> Any:
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1), nn.PixelShuffle(2), nn.GELU(), nn.PixelUnshuffle(4), nn.Conv2d(128, 8, 1)
    )
    return model, (pictures(),), mean_square


@entry
def patches_by_unfold() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8 * 9, 8 * 9)

        def forward(self, x: Tensor) -> Tensor:
            patches = F.unfold(x, 3, padding=1)
            made = self.inner(patches.transpose(1, 2)).transpose(1, 2)
            return F.fold(made, x.shape[2:], 3, padding=1)

    return Net(), (floats(BATCH, 8, 8, 8),), mean_square


@entry
def adaptive_pools() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 32, 3, padding=1)
            self.head = nn.Linear(32 * (1 + 4 + 9 + 4), 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.conv(x))
            pools = [F.adaptive_avg_pool2d(x, n).flatten(1) for n in (1, 2, 3)]
            return self.head(torch.cat([*pools, F.adaptive_max_pool2d(x, 2).flatten(1)], 1))

    return Net(), (pictures(), classes()), F.cross_entropy


@entry
def pools_of_all_kinds() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(8, 32, 3, padding=1), nn.LazyLinear(8)
            self(pictures())

        def forward(self, x: Tensor) -> Tensor:
            x = F.avg_pool2d(self.conv(x), 3, 2, padding=1, count_include_pad=False)
            y = F.max_pool2d(x, 3, 2, padding=1, ceil_mode=True)
            return self.head(torch.cat([F.lp_pool2d(x, 2, 2).flatten(1), y.flatten(1)], 1))

    return Net(), (pictures(), classes()), F.cross_entropy


@entry
def transposed_convolutions() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.ConvTranspose1d(8, 16, 4, stride=2, padding=1, groups=4)
            self.two = nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1, output_padding=1, groups=2)
            self.three = nn.ConvTranspose3d(8, 8, 2, stride=2)

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return self.one(x).square().mean() + self.two(y).square().mean() + self.three(z).square().mean()

    return Net(), (floats(BATCH, 8, 16), floats(BATCH, 8, 8, 8), floats(BATCH, 8, 4, 4, 4)), None


@entry
def padded_in_all_ways() -> Any:
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="replicate"),
        nn.ConstantPad2d((1, 0, 2, 1), 0.5),
        nn.Conv2d(16, 8, 3, padding="same"),
    )
    return model, (pictures(),), mean_square


@entry
def spatial_transformer() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Sequential(nn.Flatten(), nn.Linear(8 * SIDE * SIDE, 6))
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            theta = self.where(x).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, device=x.device)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            return self.conv(F.grid_sample(x, grid, align_corners=False, padding_mode="border"))

    return Net(), (pictures(),), mean_square


@entry
def spectral_and_instance_norms() -> Any:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 16, 3, padding=1)),
        nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.GroupNorm(1, 8),
    )
    return model, (pictures(),), mean_square


@entry
def resized_in_all_ways() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.interpolate(self.conv(x), scale_factor=2, mode="nearest")
            x = F.interpolate(x, size=(24, 24), mode="bilinear", align_corners=True)
            x = F.interpolate(x, size=(12, 10), mode="area")
            return F.interpolate(x, scale_factor=1.5, mode="bicubic")

    return Net(), (pictures(),), mean_square


@entry
def dropped_paths_and_channels() -> Any:
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1), nn.Dropout2d(0.2), nn.RReLU(), nn.Conv2d(32, 8, 1), nn.AlphaDropout(0.1)
    )
    return model, (pictures(),), mean_square


@entry
def activations_of_all_kinds() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = (
                nn.PReLU(WIDTH), nn.Hardswish(), nn.Hardsigmoid(), nn.Mish(), nn.Softplus(), nn.LogSigmoid(),
                nn.Softshrink(), nn.Hardshrink(), nn.Tanhshrink(), nn.Softsign(), nn.ReLU6(), nn.Hardtanh(),
                nn.Threshold(0.1, 0.0), nn.SiLU(), nn.GELU("tanh"), nn.Softmin(-1), nn.LogSoftmax(-1),
            )  # fmt: skip
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), kind) for kind in kinds)

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x) for layer in self.layers)

    return Net(), (floats(BATCH, WIDTH),), mean_square


@entry
def gated_units_and_maxout() -> Any:
    model = nn.Sequential(
        nn.Linear(WIDTH, 256), nn.GLU(), nn.Unflatten(1, (32, 4)), Lambda(lambda x: x.amax(-1)), nn.Linear(32, 8)
    )
    return model, (floats(BATCH, WIDTH), classes()), F.cross_entropy


@entry
def bilinear_and_distances() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = nn.Bilinear(WIDTH, 32, 16)
            self.centres = nn.Parameter(floats(24, 16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            made = self.mixed(x, y)
            far = torch.cdist(made, self.centres)
            return far.min(1).values.mean() + F.pairwise_distance(made, made.roll(1, 0)).mean()

    return Net(), (floats(BATCH, WIDTH), floats(BATCH, 32)), None


# Losses.


@entry
def losses_of_vectors() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 32)

        def forward(self, a: Tensor, b: Tensor, sign: Tensor) -> Tensor:
            x, y = self.inner(a), self.inner(b)
            total = F.cosine_embedding_loss(x, y, sign) + F.margin_ranking_loss(x[:, 0], y[:, 0], sign)
            total = total + F.hinge_embedding_loss(x, sign.unsqueeze(1).expand_as(x)) + F.smooth_l1_loss(x, y)
            total = total + F.huber_loss(x, y, delta=0.5) + F.triplet_margin_loss(x, y, x.flip(0)) + F.l1_loss(x, y)
            return total + F.soft_margin_loss(x, sign.unsqueeze(1).expand_as(x))

    sign = torch.where(uniform(BATCH) > 0.5, 1.0, -1.0)
    return Net(), (floats(BATCH, WIDTH), floats(2 * BATCH, WIDTH)[BATCH:].clone(), sign), None


@entry
def losses_of_classes() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 8)
            self.register_buffer("weights", uniform(8) + 0.5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.inner(x)
            total = F.cross_entropy(scores, labels, weight=self.weights, label_smoothing=0.1)
            total = total + F.multi_margin_loss(scores, labels) + F.nll_loss(F.log_softmax(scores, 1), labels)
            many = F.one_hot(labels, 8).float()
            total = total + F.multilabel_soft_margin_loss(scores, many)
            total = total + F.binary_cross_entropy_with_logits(scores, many, pos_weight=self.weights)
            total = total + F.binary_cross_entropy(torch.sigmoid(scores), many)
            return total + F.cross_entropy(scores, torch.softmax(many, 1))

    return Net(), (floats(BATCH, WIDTH), classes()), None


@entry
def losses_of_distributions() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 32)

        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            made = self.inner(x)
            total = F.poisson_nll_loss(made, counts) + F.gaussian_nll_loss(made, counts, F.softplus(made) + 0.1)
            normal = torch.distributions.Normal(made, F.softplus(made) + 0.1, validate_args=False)
            other = torch.distributions.Normal(torch.zeros_like(made), torch.ones_like(made), validate_args=False)
            return total + torch.distributions.kl_divergence(normal, other).mean() - normal.log_prob(counts).mean()

    return Net(), (floats(BATCH, WIDTH), tokens(BATCH, 32, below=5, least=0).float()), None


@entry
def segmentation_with_ignored_pixels() -> Any:
    labels = tokens(BATCH, SIDE, SIDE, below=8, least=0)
    labels[:, :2] = 255
    model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 1))
    return model, (pictures(), labels), lambda out, aim: F.cross_entropy(out, aim, ignore_index=255)


@entry
def focal_and_dice() -> Any:
    def loss(out: Tensor, aim: Tensor) -> Tensor:
        p = torch.sigmoid(out)
        near = p * aim + (1 - p) * (1 - aim)
        focal = ((1 - near) ** 2 * F.binary_cross_entropy_with_logits(out, aim, reduction="none")).mean()
        return focal + 1 - 2 * (p * aim).sum() / (p + aim).sum()

    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 1))
    return model, (pictures(), (uniform(BATCH, 1, SIDE, SIDE) > 0.7).float()), loss


@entry
def speech_by_ctc() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 12)

        def forward(self, x: Tensor, aim: Tensor, lengths: Tensor, aim_lengths: Tensor) -> Tensor:
            scores = F.log_softmax(self.inner(x), -1).transpose(0, 1)
            return F.ctc_loss(scores, aim, lengths, aim_lengths)

    lengths = torch.full((BATCH,), SEQ), torch.full((BATCH,), 5)
    return Net(), (floats(BATCH, SEQ, WIDTH), tokens(BATCH, 5, below=12, least=1), *lengths), None
