"""Full overwrites of a tensor, as values; for `decompositions.py`.

Functionalization turns `a.copy_(b)` into `copy(a, b)`, a new tensor, and leaves `a` unchanged. torch_xla's own kernel
of `copy` writes into `a` instead, so that earlier readers of `a` would see the new value. Copies are therefore made
from the source alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`source` with the shape, dtype and device of the tensor that it overwrites: always a new tensor."""
    aten = torch.ops.aten
    made = source
    if source.device.type != target.device.type:
        made = aten._to_copy.default(source, dtype=target.dtype, device=target.device)
        made = torch._from_functional_tensor(made) if torch._is_functional_tensor(made) else made
    elif source.dtype != target.dtype:
        made = aten._to_copy.default(source, dtype=target.dtype)
    if made.shape != target.shape:
        made = aten.expand_copy.default(made, target.shape)
    return aten.clone.default(made) if made is source else made


def several_copied(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> list[torch.Tensor]:
    """Each of `sources` over one of `targets`."""
    return [copied(target, source) for target, source in zip(targets, sources, strict=True)]
