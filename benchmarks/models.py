"""The models that the benchmarks plan, compile and compare: real widths, few layers, one AdamW training step each.

Nothing is downloaded and no weights are allocated: transformers' types come from their default configurations with the
settings below, the others are built here on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autoshard.capture.program import Program
from autoshard.capture.sources import Source, load_source


def hf(model_type: str, batch: int = 8, seq: int = 512, **settings: object) -> Source:
    """A transformers type; `settings` change fields of its default configuration."""
    text = {key: str(value) for key, value in settings.items()}
    return load_source(f"hf:{model_type}", batch=batch, seq=seq, settings=text, train="adamw")


def mlp() -> Source:
    """Two linear layers around a GELU, 1024-4096-1024, 512 rows."""
    import torch

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
        inputs = (torch.empty(512, 1024),)
    return Source(model, inputs, lambda out: out.square().mean(), adamw, train=True)


def adamw(parameters: object) -> object:
    """The optimizer of every step here."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], Source]] = {
    "mlp": mlp,
    "gpt2": partial(hf, "gpt2", n_layer=2),
    "llama": partial(
        hf, "llama", num_hidden_layers=2, hidden_size=2048, intermediate_size=5632, num_attention_heads=16
    ),
}
"""Name -> the source; add a model here and every benchmark has it."""


def program(name: str) -> Program:
    """The captured training step of the model called `name`."""
    from autoshard.capture.torch_xla import capture

    source = MODELS[name]()
    return capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
