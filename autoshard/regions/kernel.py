"""A kernel of one device, a jax function, as StableHLO functions that a region calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from autoshard.dtypes import numpy_dtype
from autoshard.program import TensorType

Platform = Literal["cpu", "gpu", "tpu"]
Extras = tuple[tuple[np.ndarray[Any, Any], int | None], ...]
"""Constants that a kernel takes after the operands, each with the dim that is split (`RegionDims.extras`), or None."""
_LOWERED_FOR = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


@dataclass(frozen=True)
class Kernel:
    """A lowered kernel.

    Attributes:
        name: `splash attention`, `cuDNN`, or empty where it is written out.
        why: then, why.
        text: StableHLO functions; the one to call is `@{entry}`.
        extras: as there.
    """

    name: str
    why: str
    entry: str
    text: str = field(repr=False)
    extras: Extras = field(repr=False)


def stablehlo_of(
    function: Callable[..., Sequence[Any]], operands: Sequence[TensorType], extras: Extras, shards: int,
    platform: Platform, entry: str,
) -> str:  # fmt: skip
    """The StableHLO functions of a jax function of local operands and its part of the extras."""
    import jax

    given = [jax.ShapeDtypeStruct(kind.shape, numpy_dtype(kind.dtype)) for kind in operands]
    for array, dim in extras:
        shape = [n // shards if i == dim else n for i, n in enumerate(array.shape)]
        given.append(jax.ShapeDtypeStruct(tuple(shape), array.dtype))
    traced = jax.jit(function, keep_unused=True).trace(*given)
    return _renamed(traced.lower(lowering_platforms=(_LOWERED_FOR[platform],)).as_text(), entry)


def _renamed(text: str, entry: str) -> str:
    """A module's functions, private, with names that begin with `entry`."""
    body = text[text.index("\n") + 1 : text.rindex("}")]
    for own in re.findall(r"func\.func (?:public|private) @([\w.]+|\"[^\"]+\")\(", body):
        plain = re.sub(r"\W", "_", own)
        body = re.sub(rf"@{re.escape(own)}(?=\()", f"@{entry}" if own == "main" else f"@{entry}_{plain}", body)
    return body.replace("func.func public", "func.func private")
