"""Changes of the `transformers` switch to that library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autoshard.frontends.tracing.device import current, is_xla


@contextlib.contextmanager
def transformers_traced(model: torch.nn.Module | None) -> Iterator[None]:
    """Make transformers' mask code skip value checks as under tracing; disable the key-value cache."""
    configs: dict[int, Any] = {}
    for module in model.modules() if model is not None else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            configs[id(config)] = config
    utilities: Any = sys.modules.get("transformers.utils.import_utils")
    masks: Any = sys.modules.get("transformers.masking_utils")
    is_fake = getattr(utilities, "is_fake_tensor", None)
    find_packed = getattr(masks, "find_packed_sequence_indices", None)

    def packed(position_ids: torch.Tensor) -> Any:
        # Under tracing, transformers assumes that given positions may be of packed sequences; those that a model
        # makes itself are of one sequence each, as a look at their values would show.
        return find_packed(position_ids) if find_packed and _reads_data(position_ids) else None

    try:
        for config in configs.values():
            config.use_cache = False
        if is_fake is not None:
            utilities.is_fake_tensor = lambda x: _on_xla(x) or is_fake(x)
        if find_packed is not None:
            masks.find_packed_sequence_indices = packed
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
        if is_fake is not None:
            utilities.is_fake_tensor = is_fake
        if find_packed is not None:
            masks.find_packed_sequence_indices = find_packed


def _reads_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor depends on device data of more than one element (an input, a parameter)."""
    return current().reads_data(tensor) if is_xla(tensor) else True


def _on_xla(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_xla(value)
