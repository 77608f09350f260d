"""Image models at the size of published ones, for `real.py`: a diffusion transformer and a latent U-Net, on meta.

Sizes are those of DiT-XL/2 (arXiv:2212.09748) and of the U-Net of Stable Diffusion XL (arXiv:2307.01952).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):  # type: ignore[misc]
    """Self-attention, or attention to a context, without a mask."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        """Of queries `width` wide, and keys of the context's width."""
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(context or width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        """Of `(batch, positions, width)`."""
        read = x if context is None else context
        query, key, value = (
            project(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, given in ((self.query, x), (self.key, read), (self.value, read))
        )
        made = functional.scaled_dot_product_attention(query, key, value)
        result: torch.Tensor = self.out(made.transpose(1, 2).flatten(2))
        return result


class DiTBlock(nn.Module):  # type: ignore[misc]
    """A transformer block whose norms are scaled and shifted by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        """Of `(batch, positions, width)`."""
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width, elementwise_affine=False), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        parts = self.condition(functional.silu(condition)).unsqueeze(1).chunk(6, -1)
        x = x + parts[2] * self.attention(self.norm(x) * (1 + parts[1]) + parts[0])
        made: torch.Tensor = x + parts[5] * self.mlp(self.norm(x) * (1 + parts[4]) + parts[3])
        return made


class DiT(nn.Module):  # type: ignore[misc]
    """A diffusion transformer on patches of latents."""

    def __init__(self, width: int, layers: int, heads: int, patch: int, channels: int) -> None:
        """Predicts the noise."""
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, patch * patch * channels)

    def forward(self, latents: torch.Tensor, time: torch.Tensor, label: torch.Tensor, noise: torch.Tensor) -> Any:
        """The loss, of latents `(batch, channels, height, width)` and noise by patch."""
        x = self.patches(latents).flatten(2).transpose(1, 2)
        condition = self.time(time) + self.labels(label)
        for block in self.blocks:
            x = block(x, condition)
        return (self.head(x) - noise).float().square().mean()


def dit(batch: int = 256, layers: int = 28, dtype: str = "bf16") -> dict[str, Any]:
    """DiT-XL/2 on latents of 32 x 32 x 4."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    with torch.device("meta"):
        model = DiT(1152, layers, 16, 2, 4).to(kind).train()
    inputs = {
        "latents": torch.zeros(batch, 4, 32, 32, dtype=kind),
        "time": torch.zeros(batch, 256, dtype=kind),
        "label": torch.zeros(batch, dtype=torch.long),
        "noise": torch.zeros(batch, 256, 16, dtype=kind),
    }
    return {"model": model, "inputs": inputs, "loss_fn": lambda loss: loss}


class Residual(nn.Module):  # type: ignore[misc]
    """Two convolutions with the time between."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        """Of `(batch, channels, height, width)`."""
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(32, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.second_norm, self.second = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.across = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        y = self.first(functional.silu(self.first_norm(x))) + self.time(functional.silu(time))[:, :, None, None]
        made: torch.Tensor = self.across(x) + self.second(functional.silu(self.second_norm(y)))
        return made


class Spatial(nn.Module):  # type: ignore[misc]
    """Transformer blocks over positions of an image, that attend to a text."""

    def __init__(self, channels: int, depth: int, context: int) -> None:
        """Heads of 64."""
        super().__init__()
        self.norm, self.enter, self.leave = nn.GroupNorm(32, channels), *(nn.Linear(channels, channels) for _ in "io")
        self.own = nn.ModuleList(Attention(channels, channels // 64) for _ in range(depth))
        self.text = nn.ModuleList(Attention(channels, channels // 64, context) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(channels, 8 * channels) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * channels, channels) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3 * depth))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        height = x.shape[2]
        y = self.enter(self.norm(x).flatten(2).transpose(1, 2))
        for i, (own, text, up, down) in enumerate(zip(self.own, self.text, self.up, self.down, strict=True)):
            y = y + own(self.norms[3 * i](y))
            y = y + text(self.norms[3 * i + 1](y), context)
            wide, gate = up(self.norms[3 * i + 2](y)).chunk(2, -1)
            y = y + down(wide * functional.gelu(gate))
        made: torch.Tensor = x + self.leave(y).transpose(1, 2).unflatten(2, (height, -1))
        return made


class UNet(nn.Module):  # type: ignore[misc]
    """A latent U-Net of three resolutions with transformer blocks at the lower two."""

    def __init__(self, widths: tuple[int, ...] = (320, 640, 1280), depths: tuple[int, ...] = (0, 2, 10)) -> None:
        """Two residual blocks down and three up at each resolution."""
        super().__init__()
        time, context = 4 * widths[0], 2048
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.begin, self.end = nn.Conv2d(4, widths[0], 3, padding=1), nn.Conv2d(widths[0], 4, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, channels = [widths[0]], widths[0]
        for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for _ in range(2):
                self.down.append(nn.ModuleList([Residual(channels, width, time), self._spatial(width, depth, context)]))
                channels = width
                kept.append(width)
            if level < len(widths) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(width, width, 3, 2, 1)]))
                kept.append(width)
        first, last = (Residual(channels, channels, time) for _ in range(2))
        self.middle = nn.ModuleList([first, Spatial(channels, depths[-1], context), last])
        for level, (width, depth) in reversed(list(enumerate(zip(widths, depths, strict=True)))):
            for _ in range(3):
                block = [Residual(channels + kept.pop(), width, time), self._spatial(width, depth, context)]
                self.up.append(nn.ModuleList(block))
                channels = width
            if level:
                self.up.append(nn.ModuleList([nn.Conv2d(width, width, 3, padding=1)]))

    @staticmethod
    def _spatial(width: int, depth: int, context: int) -> nn.Module:
        return Spatial(width, depth, context) if depth else nn.Identity()

    def forward(self, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor, noise: torch.Tensor) -> Any:
        """The loss, of latents `(batch, 4, height, width)` and a text `(batch, tokens, 2048)`."""
        t = self.time(time)
        x = self.begin(latents)
        kept = [x]
        for block in self.down:
            x = block[0](x) if len(block) == 1 else self._both(block, x, t, text)
            kept.append(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, t), text), t)
        for block in self.up:
            if len(block) == 1:
                x = block[0](functional.interpolate(x, scale_factor=2.0))
            else:
                x = self._both(block, torch.cat([x, kept.pop()], 1), t, text)
        return (self.end(functional.silu(x)) - noise).float().square().mean()

    @staticmethod
    def _both(block: Any, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = block[0](x, time)
        made: torch.Tensor = block[1](y, text) if isinstance(block[1], Spatial) else y
        return made


def unet(batch: int = 16, dtype: str = "bf16") -> dict[str, Any]:
    """A U-Net as large as SDXL's on latents of 128 x 128 x 4."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    with torch.device("meta"):
        model = UNet().to(kind).train()
    inputs = {
        "latents": torch.zeros(batch, 4, 128, 128, dtype=kind),
        "time": torch.zeros(batch, 320, dtype=kind),
        "text": torch.zeros(batch, 77, 2048, dtype=kind),
        "noise": torch.zeros(batch, 4, 128, 128, dtype=kind),
    }
    return {"model": model, "inputs": inputs, "loss_fn": lambda loss: loss}
