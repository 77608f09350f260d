"""Nets for images, points and rays, and what generates them, for `coverage.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.nets import mlp
from benchmarks.zoo_entry import BATCH, WIDTH, classes, entry, floats, tokens, uniform


class Residual(nn.Module):
    """x + f(norm(x))."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.inner(self.norm(x))
        return made


class Swapped(nn.Module):
    """A module over the dim before the last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return made


@entry
def mlp_mixer() -> Any:
    def block() -> nn.Module:
        across = Swapped(mlp([16, 32, 16]))
        return nn.Sequential(
            Residual(nn.LayerNorm(WIDTH), across), Residual(nn.LayerNorm(WIDTH), mlp([WIDTH, 128, WIDTH]))
        )

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, 8, 8)
            self.blocks = nn.Sequential(block(), block())
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
            return self.head(x.mean(1))

    return Mixer(), (floats(BATCH, 3, 32, 32), classes()), F.cross_entropy


def conv_bn(before: int, after: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False, **options), nn.BatchNorm2d(after), nn.ReLU()
    )


@entry
def residual_net() -> Any:
    class Block(nn.Module):
        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            self.first, self.second = conv_bn(before, after, stride=stride), conv_bn(after, after)
            self.short = nn.Conv2d(before, after, 1, stride) if stride > 1 or before != after else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.second(self.first(x)) + self.short(x))

    model = nn.Sequential(
        conv_bn(3, 16, 7, stride=2), nn.MaxPool2d(3, 2, 1), Block(16, 16, 1), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, (floats(BATCH, 3, 32, 32), classes()), F.cross_entropy


@entry
def plain_convnext() -> Any:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
            self.norm, self.mlp = (
                nn.LayerNorm(width),
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            )
            self.scale = nn.Parameter(torch.full((width,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            made = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))) * self.scale
            return x + made.permute(0, 3, 1, 2)

    model = nn.Sequential(nn.Conv2d(3, 32, 4, 4), Block(32), nn.Conv2d(32, 64, 2, 2), Block(64),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 10))  # fmt: skip
    return model, (floats(BATCH, 3, 32, 32), classes()), F.cross_entropy


@entry
def u_net() -> Any:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.down, self.middle = block(3, 16), nn.Conv2d(16, 16, 3, 2, 1), block(16, 32)
            self.out, self.head = block(48, 16), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            skip = self.enter(x)
            low = self.middle(self.down(skip))
            up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
            return self.head(self.out(torch.cat([skip, up], 1)))

    return UNet(), (floats(BATCH, 3, 16, 16), tokens(BATCH, 16, 16, below=4, least=0)), F.cross_entropy


@entry
def depthwise_net() -> Any:
    class Squeeze(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate = nn.Sequential(nn.Conv2d(width, 8, 1), nn.ReLU(), nn.Conv2d(8, width, 1), nn.Hardsigmoid())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gate(F.adaptive_avg_pool2d(x, 1))

    model = nn.Sequential(
        conv_bn(3, 16, stride=2), conv_bn(16, 16, groups=16), Squeeze(16), conv_bn(16, 32, 1), nn.Hardswish(),
        conv_bn(32, 32, 5, groups=32, stride=2), conv_bn(32, 64, 1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return model, (floats(BATCH, 3, 32, 32), classes()), F.cross_entropy


@entry
def super_resolution() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.PReLU(32), nn.Conv2d(32, 12, 3, padding=1), nn.PixelShuffle(2)
    )
    return model, (floats(BATCH, 3, 8, 8), floats(BATCH, 3, 16, 16)), F.l1_loss


@entry
def video_net() -> Any:
    model = nn.Sequential(
        nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, (floats(BATCH, 3, 4, 16, 16), classes()), F.cross_entropy


@entry
def autoencoder() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.InstanceNorm2d(32, affine=True),
        nn.ELU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.Softplus(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    images = floats(BATCH, 3, 16, 16)
    return model, (images, images), F.mse_loss


@entry
def diffusion_transformer() -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(approximate="tanh"), nn.Linear(256, WIDTH))
            self.one, self.two = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
            self.condition = nn.Linear(WIDTH, 6 * WIDTH)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            a, b, g, d, e, h = self.condition(F.silu(c)).unsqueeze(1).chunk(6, -1)
            y = self.one(x) * (1 + a) + b
            x = x + g * self.attention(y, y, y, need_weights=False)[0]
            return x + h * self.mlp(self.two(x) * (1 + d) + e)

    class DiT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(4, WIDTH, 2, 2)
            self.positions = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
            self.time, self.label = mlp([32, WIDTH, WIDTH]), nn.Embedding(10, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, 16)

        def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            rates = torch.exp(-math.log(1e4) * torch.arange(16, device=x.device) / 16)
            angles = times.unsqueeze(1) * rates
            c = self.time(torch.cat([angles.cos(), angles.sin()], 1)) + self.label(labels)
            y = self.patches(x).flatten(2).transpose(1, 2) + self.positions
            for block in self.blocks:
                y = block(y, c)
            y = self.head(y).view(-1, 4, 4, 4, 2, 2)
            return torch.einsum("nhwcpq->nchpwq", y).reshape(-1, 4, 8, 8)

    return DiT(), (floats(BATCH, 4, 8, 8), uniform(BATCH), classes(), floats(BATCH, 4, 8, 8)), F.mse_loss


class VAE(nn.Module):
    """Kingma and Welling 2014 (arXiv:1312.6114); `noise` is given, or drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp([WIDTH, 128, 2 * 16]), mlp([16, 128, WIDTH])

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * (torch.randn_like(mean) if noise is None else noise)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(z), x) + 0.01 * kl


@entry
def vae() -> Any:
    return VAE(), (floats(BATCH, WIDTH), floats(BATCH, 16)), None


@entry
def vae_drawing() -> Any:
    return VAE(), (floats(BATCH, WIDTH),), None


@entry
def nerf() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.rest = mlp([3 + 36, WIDTH, WIDTH], last=nn.ReLU), mlp([WIDTH + 39, WIDTH, WIDTH])
            self.density, self.color = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

        def forward(self, rays: Tensor, depths: Tensor) -> Tensor:
            origin, direction = rays.split(3, -1)
            depths = depths.abs().cumsum(-1)
            points = origin.unsqueeze(1) + depths.unsqueeze(-1) * direction.unsqueeze(1)
            scaled = points.unsqueeze(-1) * 2.0 ** torch.arange(6, device=rays.device)
            x = torch.cat([points, scaled.sin().flatten(2), scaled.cos().flatten(2)], -1)
            h = self.rest(torch.cat([self.trunk(x), x], -1))
            gaps = torch.cat([depths[:, 1:] - depths[:, :-1], torch.full_like(depths[:, :1], 1.0)], 1)
            alpha = 1 - torch.exp(-F.softplus(self.density(h)).squeeze(-1) * gaps)
            clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], 1), 1)[:, :-1]
            return ((alpha * clear).unsqueeze(-1) * torch.sigmoid(self.color(h))).sum(1)

    return Net(), (floats(32, 6), uniform(32, 8), uniform(32, 3)), F.mse_loss


class Attention(nn.Module):
    """Self-attention, or attention to another sequence."""

    def __init__(self, width: int = WIDTH, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.both, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, to: Tensor | None = None) -> Tensor:
        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

        k, v = self.both(x if to is None else to).chunk(2, -1)
        made = F.scaled_dot_product_attention(split(self.query(x)), split(k), split(v), is_causal=self.causal)
        return self.out(made.transpose(-3, -2).flatten(-2))


@entry
def windowed_attention() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.attention, self.norm = nn.Conv2d(3, WIDTH, 4, 4), Attention(), nn.LayerNorm(WIDTH)
            self.bias, self.head = nn.Parameter(torch.zeros(16, WIDTH)), nn.Linear(WIDTH, 10)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).permute(0, 2, 3, 1)
            batch, side = x.shape[0], x.shape[1]
            moved = torch.roll(self.norm(x), (-2, -2), (1, 2))
            windows = moved.view(batch, side // 4, 4, side // 4, 4, WIDTH).transpose(2, 3).reshape(-1, 16, WIDTH)
            made = self.attention(windows + self.bias).view(batch, side // 4, side // 4, 4, 4, WIDTH)
            x = x + torch.roll(made.transpose(2, 3).reshape(batch, side, side, WIDTH), (2, 2), (1, 2))
            return self.head(x.mean((1, 2)))

    return Net(), (floats(BATCH, 3, 32, 32), classes()), F.cross_entropy


@entry
def perceiver_net() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(8, WIDTH) * 0.02)
            self.enter, self.cross, self.self_attention = nn.Linear(16, WIDTH), Attention(), Attention()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            z = self.latents.expand(x.shape[0], -1, -1)
            z = z + self.cross(self.norms[0](z), self.norms[1](self.enter(x)))
            z = z + self.self_attention(self.norms[2](z))
            return self.head(z.mean(1))

    return Net(), (floats(BATCH, 32, 16), classes()), F.cross_entropy


@entry
def contrastive_global_batch() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                conv_bn(3, 16, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), mlp([64, 64, 32])
            )

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            z = F.normalize(torch.cat([self.encoder(one), self.encoder(two)]), dim=1)
            scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -1e9)
            labels = torch.arange(len(z), device=z.device).roll(len(one))
            return F.cross_entropy(scores, labels)

    return Net(), (floats(BATCH, 3, 16, 16), uniform(BATCH, 3, 16, 16)), None


@entry
def point_net() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, WIDTH, 1))
            self.head = mlp([WIDTH, 32, 10])

        def forward(self, points: Tensor) -> Tensor:
            return F.log_softmax(self.head(self.each(points).max(-1).values), -1)

    return Net(), (floats(BATCH, 3, 32), classes()), F.nll_loss


@entry
def detection_head() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(conv_bn(3, 16, stride=2), conv_bn(16, 32, stride=2))
            self.lateral, self.smooth = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
            self.score, self.box = nn.Conv2d(32, 5, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)

        def forward(self, images: Tensor, targets: Tensor, boxes: Tensor) -> Tensor:
            fine = self.trunk[0](images)
            coarse = self.trunk[1](fine)
            p = self.smooth(self.lateral(fine) + F.interpolate(coarse * 1.0, scale_factor=2, mode="nearest"))
            chance = torch.sigmoid(self.score(p))
            focal = -(targets * (1 - chance).square() * (chance + 1e-6).log()).mean()
            away = -((1 - targets) * chance.square() * (1 - chance + 1e-6).log()).mean()
            return focal + away + F.smooth_l1_loss(F.relu(self.box(p)), boxes, beta=0.5)

    heat, boxes = uniform(BATCH, 5, 16, 16), uniform(BATCH, 4, 16, 16)
    return Net(), (floats(BATCH, 3, 32, 32), heat, boxes), None
