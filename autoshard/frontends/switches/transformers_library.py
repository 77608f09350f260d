"""Changes of the `transformers` switch to that library."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from autoshard.frontends.switches.windows import Window, window_of
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

    attention: Any = sys.modules.get("transformers.integrations.sdpa_attention")
    shares_keys, kinds = getattr(attention, "use_gqa_in_sdpa", None), getattr(masks, "AttentionMaskInterface", None)
    try:
        for config in configs.values():
            config.use_cache = False
        if shares_keys is not None:
            attention.use_gqa_in_sdpa = lambda *_: True  # else it repeats keys for each query head under a mask
        if kinds is not None:
            for kind in ("sdpa", "eager"):
                kinds._global_mapping[kind] = partial(_described, getattr(masks, f"{kind}_mask"))
        if is_fake is not None:
            utilities.is_fake_tensor = lambda x: _on_xla(x) or is_fake(x)
        if find_packed is not None:
            masks.find_packed_sequence_indices = packed
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
        if shares_keys is not None:
            attention.use_gqa_in_sdpa = shares_keys
        if kinds is not None:
            for kind in ("sdpa", "eager"):
                kinds._global_mapping[kind] = getattr(masks, f"{kind}_mask")
        if is_fake is not None:
            utilities.is_fake_tensor = is_fake
        if find_packed is not None:
            masks.find_packed_sequence_indices = find_packed


def _reads_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor depends on device data of more than one element (an input, a parameter)."""
    return current().reads_data(tensor) if is_xla(tensor) else True


def _on_xla(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_xla(value)


def _described(mask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """transformers' mask, which remembers what it masks where that is a window: see `masked_as`."""
    made = mask(*args, **kwargs)
    call = inspect.signature(mask).bind(*args, **kwargs)
    call.apply_defaults()
    asked = call.arguments
    begins = isinstance(asked["q_offset"], int) and asked["q_offset"] == asked["kv_offset"] == 0
    if isinstance(made, torch.Tensor) and asked["attention_mask"] is None and begins:
        allows, segments = _of_one_document(asked["mask_function"])
        window = _window(allows, *made.shape[-2:])
        made._autoshard_masks = None if window is None else (*window, segments)
    return made


def masked_as(mask: Any) -> tuple[bool, int | None, torch.Tensor | None] | None:
    """(causal, window, segments) of a mask that `transformers_traced` has made, None of others.

    Segments are `(batch, tokens)`: the document of each token, where several are packed into a sequence.
    """
    found: tuple[bool, int | None, torch.Tensor | None] | None = getattr(mask, "_autoshard_masks", None)
    return found


def _of_one_document(allows: Any) -> tuple[Any, torch.Tensor | None]:
    """The mask function inside each document, and the documents, of one for packed documents; else itself.

    Inside a document positions follow one another, so that a window of positions is one of tokens.
    """
    both = _closed_over(allows, "and_masks").get("mask_functions", ())
    if len(both) == 2:
        inside = _closed_over(both[0], "remap_positions_for_packed_sequence").get("mask_function")
        segments = _closed_over(both[1], "packed_sequence_mask_function").get("packed_sequence_mask")
        if inside is not None and isinstance(segments, torch.Tensor):
            return inside, segments
    return allows, None


def _closed_over(function: Any, maker: str) -> Mapping[str, Any]:
    """What a function of transformers' `masking_utils.<maker>` closes over; nothing of others."""
    made = getattr(function, "__module__", "") == "transformers.masking_utils"
    made = made and function.__qualname__.startswith(f"{maker}.<locals>.")
    return inspect.getclosurevars(function).nonlocals if made else {}


def _window(allows: Any, queries: int, keys: int) -> Window | None:
    """What a mask function leaves, if that is a window: see `window_of`."""
    if _holds_tensors(allows):  # such as the segments of packed sequences
        return None
    zero = torch.zeros((), dtype=torch.long)
    return window_of(lambda rows, columns: allows(zero, zero, rows, columns), queries, keys)


def _holds_tensors(function: Any) -> bool:
    """Whether a function, or one that it is made of, closes over a tensor."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [each for one in held for each in (one if isinstance(one, list | tuple) else (one,))]
    return any(isinstance(each, torch.Tensor) or (callable(each) and _holds_tensors(each)) for each in parts)
