"""The models that the benchmarks plan, compile and compare: real widths, few layers, one AdamW training step each.

Nothing is downloaded and no weights are allocated: transformers' types come from their default configurations with the
settings below, the others are built here, or in `nets.py`, on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoshard.program import Program
from autoshard.sources import Source, load_source


def hf(model_type: str, batch: int = 8, seq: int | None = 512, **settings: object) -> Source:
    """A transformers type; `settings` change fields of its default configuration."""
    text = {key: str(value) for key, value in settings.items()}
    return load_source(f"hf:{model_type}", batch=batch, seq=seq, settings=text, train="adamw")


def unet() -> Source:
    """The classical U-Net for segmentation: two levels down and up, 64 to 256 wide, 16 images of 128 x 128."""
    import torch

    with torch.device("meta"):
        model = _unet(channels=3, classes=2, widths=(64, 128, 256))
        images, classes = torch.empty(16, 3, 128, 128), torch.empty(16, 128, 128, dtype=torch.int64)
    return Source(model, (images, classes), torch.nn.functional.cross_entropy, adamw, train=True)


def denoiser() -> Source:
    """A U-Net that predicts noise: group norms, nearest-neighbour upsampling, attention-free; mean squared error."""
    import torch

    with torch.device("meta"):
        model = _unet(channels=4, classes=4, widths=(64, 128, 256), noise=True)
        images, noise = torch.empty(16, 4, 64, 64), torch.empty(16, 4, 64, 64)
    return Source(model, (images, noise), torch.nn.functional.mse_loss, adamw, train=True)


def _unet(channels: int, classes: int, widths: tuple[int, ...], noise: bool = False) -> Any:
    """Ronneberger et al. 2015 (arXiv:1505.04597) with padded convolutions: skips joined on the channel dim.

    Batch norms, max pools and transposed convolutions; or, for noise prediction (Ho et al. 2020, arXiv:2006.11239),
    group norms, strided convolutions and nearest-neighbour upsampling.
    """
    from torch import nn

    def block(before: int, after: int) -> nn.Module:
        parts: list[nn.Module] = []
        for source in (before, after):
            norm = nn.GroupNorm(32, after) if noise else nn.BatchNorm2d(after)
            parts += [nn.Conv2d(source, after, 3, padding=1), norm, nn.SiLU() if noise else nn.ReLU()]
        return nn.Sequential(*parts)

    def down(width: int) -> nn.Module:
        return nn.Conv2d(width, width, 3, stride=2, padding=1) if noise else nn.MaxPool2d(2)

    def up(before: int, after: int) -> nn.Module:
        if noise:
            return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(before, after, 3, padding=1))
        return nn.ConvTranspose2d(before, after, 2, stride=2)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = list(pairwise(widths))
            self.enter = block(channels, widths[0])
            self.downs = nn.ModuleList(down(width) for width, _ in pairs)
            self.encoder = nn.ModuleList(block(width, wider) for width, wider in pairs)
            self.ups = nn.ModuleList(up(wider, width) for width, wider in reversed(pairs))
            self.decoder = nn.ModuleList(block(2 * width, width) for width, _ in reversed(pairs))
            self.head = nn.Conv2d(widths[0], classes, 1)

        def forward(self, images: Any) -> Any:
            import torch

            x = self.enter(images)
            skips = []
            for shrink, convolve in zip(self.downs, self.encoder, strict=True):
                skips.append(x)
                x = convolve(shrink(x))
            for grow, convolve in zip(self.ups, self.decoder, strict=True):
                x = convolve(torch.cat([skips.pop(), grow(x)], dim=1))
            return self.head(x)

    return UNet()


def built(function: str, **settings: object) -> Source:
    """A model of `nets.py`; `settings` are arguments of its function."""
    text = {key: str(value) for key, value in settings.items()}
    return load_source(f"{Path(__file__).with_name('nets.py')}:{function}", settings=text, train="adamw")


def adamw(parameters: object) -> object:
    """The optimizer of every step here."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


MODELS: dict[str, Callable[..., Source]] = {
    "mlp": partial(built, "perceptron"),
    "gpt2": partial(hf, "gpt2", n_layer=2),
    "llama": partial(
        hf, "llama", num_hidden_layers=2, hidden_size=2048, intermediate_size=5632, num_attention_heads=16
    ),
    "vit": partial(hf, "vit", batch=32, seq=None, num_hidden_layers=2),
    "resnet": partial(hf, "resnet", batch=32, seq=None, depths="[1, 1, 1, 1]", hidden_sizes="[256, 512, 1024, 2048]"),
    "unet": unet,
    "denoiser": denoiser,
    "bert": partial(hf, "bert", num_hidden_layers=2),
    "t5": partial(hf, "t5", num_layers=1, num_decoder_layers=1),
    "mixtral": partial(  # a weight is gathered per token and expert: few tokens, small experts
        hf,
        "mixtral",
        seq=64,
        num_hidden_layers=1,
        hidden_size=1024,
        intermediate_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
    ),
    "moe": partial(built, "moe"),
    "dlrm": partial(built, "dlrm"),
}
"""Name -> the source; add a model here and every benchmark has it."""

LARGE: dict[str, Callable[..., Source]] = {
    "gpt2-2b": partial(hf, "gpt2", n_layer=1, n_embd=2560, n_head=20),
    "llama2-2b": partial(
        hf, "llama", num_hidden_layers=1, hidden_size=2560, intermediate_size=6912, num_attention_heads=20
    ),
    "gpt-neo-2.7b": partial(
        hf, "gpt_neo", num_layers=2, attention_types='[[["global", "local"], 1]]', hidden_size=2560, num_heads=20
    ),
}
"""The kinds of models that PyTorch/XLA's auto-sharding was benchmarked on, at widths of two billion parameters (24
layers of GPT-2 or Llama 2 so wide; GPT-Neo 2.7B has 32) and one layer (GPT-Neo: one of each kind of attention)."""

DEEP: dict[str, Callable[..., Source]] = {
    "gpt2-12": partial(hf, "gpt2"),
    "vit-12": partial(hf, "vit", batch=32, seq=None),
    "llama-8": partial(
        hf, "llama", num_hidden_layers=8, hidden_size=2048, intermediate_size=5632, num_attention_heads=16
    ),
    "moe-8": partial(built, "moe", layers=8),
}
"""Models of `MODELS` with more layers."""


def deit() -> Source:
    """DeiT as a classifier of images; `hf:deit` would be the model of masked images."""
    import torch
    from transformers import DeiTConfig, DeiTForImageClassification

    with torch.device("meta"):
        model = DeiTForImageClassification(DeiTConfig(num_hidden_layers=2)).train()
        inputs = {"pixel_values": torch.empty(32, 3, 224, 224), "labels": torch.empty(32, dtype=torch.int64)}
    return Source(model, inputs, None, adamw, train=True)


HELD_OUT: dict[str, Callable[..., Source]] = {
    "mistral": partial(hf, "mistral", num_hidden_layers=1),
    "gemma": partial(hf, "gemma", num_hidden_layers=1),
    "gptj": partial(hf, "gptj", n_layer=1),
    "mbart": partial(hf, "mbart", encoder_layers=1, decoder_layers=1),
    "layoutlm": partial(hf, "layoutlm", num_hidden_layers=2),
    "deit": deit,
    "xglm": partial(hf, "xglm", num_layers=2),
}
"""No rule and no constant was ever made on these. A model that is looked at to mend something moves to `DEVELOPED`."""

DEVELOPED: dict[str, Callable[..., Source]] = {
    "opt": partial(hf, "opt", num_hidden_layers=2),
    "electra": partial(hf, "electra", num_hidden_layers=2),
    "deberta-v2": partial(hf, "deberta-v2", num_hidden_layers=2),
    "albert": partial(hf, "albert", num_hidden_layers=2),
    "qwen2": partial(hf, "qwen2", num_hidden_layers=1),
    "whisper": partial(hf, "whisper", encoder_layers=1, decoder_layers=1),
    "gpt_neox": partial(hf, "gpt_neox", num_hidden_layers=1),
    "roberta": partial(hf, "roberta", seq=256, num_hidden_layers=2),
    "phi": partial(hf, "phi", num_hidden_layers=2),
    "distilbert": partial(hf, "distilbert", n_layers=2),
    "bloom": partial(hf, "bloom", n_layer=2),
    "stablelm": partial(hf, "stablelm", num_hidden_layers=1),
    "mpt": partial(hf, "mpt", n_layers=2),
    "bart": partial(hf, "bart", encoder_layers=1, decoder_layers=1),
    "beit": partial(hf, "beit", batch=32, seq=None, num_hidden_layers=2),
    "mamba2": partial(hf, "mamba2", seq=256, num_hidden_layers=1),
}
"""Further models that rules were made on, or read off, at one time or another."""

SETS = {"models": MODELS, "held-out": HELD_OUT, "developed": DEVELOPED}
"""What `--models` of the benchmarks takes for a whole set."""

ROW_PER_DEVICE = ("gpt2", "llama", "bert", "t5", "mixtral", "moe", *LARGE)
"""Models whose batch of 8 is too small for more devices."""


def program(name: str, devices: int = 8) -> Program:
    """The captured training step of the model called `name`; at least a row of the batch for each of `devices`."""
    from autoshard.frontends.torch_xla.program import capture

    made = (MODELS | LARGE | DEEP | HELD_OUT | DEVELOPED)[name]
    source = made(batch=devices) if devices > 8 and name in ROW_PER_DEVICE else made()
    return capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
