"""Tensors as numpy arrays and back, bf16 among them, which numpy does not have."""

from __future__ import annotations

from typing import Any

import numpy as np


def numpy_dtypes() -> dict[str, Any]:
    """Element type in StableHLO's words -> numpy dtype."""
    import ml_dtypes

    return {
        "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
        "bf16": np.dtype(ml_dtypes.bfloat16), "i64": np.dtype(np.int64), "i32": np.dtype(np.int32),
        "i16": np.dtype(np.int16), "i8": np.dtype(np.int8), "ui8": np.dtype(np.uint8), "ui32": np.dtype(np.uint32),
        "ui64": np.dtype(np.uint64), "i1": np.dtype(np.bool_), "complex<f32>": np.dtype(np.complex64),
        "complex<f64>": np.dtype(np.complex128),
    }  # fmt: skip


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
