"""Weights for models on meta, and random batches like the sample inputs."""

from __future__ import annotations

import copy
from collections.abc import Sized
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from autoshard.sources import Source, turn_checkpoints_on
from autoshard.verify.run import RunError

BATCH_SEED = 20


def with_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model on the CPU; one on meta is rebuilt with random weights from a fixed seed.

    Raises:
        RunError: a model on meta with buffers that nothing initializes.
    """
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return copy.deepcopy(model).cpu()
    torch.manual_seed(BATCH_SEED)
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "init_weights"):  # transformers: its constructor makes weights and buffers
        made: torch.nn.Module = type(model)(copy.deepcopy(config))
        wanted = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            tensor.data = tensor.data.to(wanted.get(name, tensor.dtype))
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            turn_checkpoints_on(made)
        return made.train(model.training)
    made = copy.deepcopy(model).to_empty(device="cpu")
    fresh: set[int] = set()
    for module in made.modules():
        begin = getattr(module, "reset_parameters", None)
        if callable(begin):
            begin()
            fresh |= {id(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    with torch.no_grad():
        for parameter in made.parameters():
            if id(parameter) not in fresh:
                parameter.normal_(0.0, 0.02)
    stale = next((name for name, buffer in made.named_buffers() if id(buffer) not in fresh), None)
    if stale is not None:
        raise RunError(
            f"the model is on meta and nothing says what its buffer {stale} holds; build it with weights to run it"
        )
    return made


def random_batch(source: Source, model: torch.nn.Module, step: int, reads: Sized = ()) -> Any:
    """Random inputs of the sample's types: normal floats, tokens below the vocabulary; masks as they are, or ones.

    Integers of a sample with values keep their range: each batch shuffles them; so do floats of which none is negative
    (probabilities, counts, pixels). Tensors that are one object in the sample are one here.

    Args:
        reads: values that the program read on the host; where there are any, integers are the sample's: others may
            make another program (edges of a graph).
    """
    generator = torch.Generator().manual_seed(BATCH_SEED + 1 + step)
    leaves, spec = tree_flatten_with_path(source.inputs)
    images = any(_leaf_name(path) == "pixel_values" for path, _ in leaves)
    made: dict[int, torch.Tensor] = {}
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            held = len(reads) and not leaf.is_meta and not leaf.is_floating_point() and not leaf.is_complex()
            drawn = _random_like(leaf, _leaf_name(path), model, images, generator)
            made[id(leaf)] = leaf.detach().cpu().clone() if held else drawn
    return torch.utils._pytree.tree_unflatten(
        [made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves], spec
    )


def _random_like(
    sample: torch.Tensor, name: str, model: torch.nn.Module, images: bool, generator: torch.Generator
) -> torch.Tensor:
    if sample.is_floating_point() and not _never_negative(sample):
        return torch.randn(sample.shape, generator=generator).to(sample.dtype)
    if not sample.is_meta:
        order = torch.randperm(sample.numel(), generator=generator)
        return sample.detach().cpu().reshape(-1)[order].reshape(sample.shape)
    if sample.dtype == torch.bool or "mask" in name:
        return torch.ones(sample.shape, dtype=sample.dtype)
    return torch.randint(0, _classes(model, images), sample.shape, generator=generator).to(sample.dtype)


def _never_negative(sample: torch.Tensor) -> bool:
    """Whether a sample implies non-negative values; zeros alone do not, nor does uninitialised memory."""
    if sample.is_meta or sample.numel() == 0:
        return False
    values = sample.detach().cpu().float()
    least, most = float(values.min()), float(values.max())
    return 0 <= least < most and 1e-3 <= most <= 2**16


def _classes(model: torch.nn.Module, images: bool) -> int:
    """Upper bound of integer inputs: the vocabulary, or the labels of a classifier."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "num_labels", None) if images else getattr(text, "vocab_size", None)
    if found is None:
        rows = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        found = min(rows, default=2)
    return int(found)


def _leaf_name(path: Any) -> str:
    return str(getattr(path[-1], "key", "")) if path else ""
