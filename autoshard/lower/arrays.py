"""Conversion between tensors and numpy arrays, with bf16, which numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """A tensor, or whatever numpy takes, as a numpy array; bf16 keeps its bits."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import torch

    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return np.asarray(tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(tensor.numpy())


def to_torch(array: np.ndarray[Any, Any]) -> Any:
    """A numpy array as a tensor of its own; bf16 keeps its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
