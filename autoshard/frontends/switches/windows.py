"""Which of the masks that a fused attention has, causal or a window, a function of indices is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_ROWS = 64
"""Fewest rows of a large mask that are looked at."""
_SCORES = 1 << 22
"""Scores of a mask up to which all of it is looked at."""


class Window(NamedTuple):
    """A mask: `Form.causal` and `Form.window`."""

    causal: bool
    window: int | None

    def mask(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Whether each of these columns counts for each of these rows, `(r, 1)`."""
        apart = rows - columns
        allowed = apart >= 0 if self.causal else torch.ones_like(apart, dtype=torch.bool)
        return allowed if self.window is None else allowed & (apart < self.window) & (-apart < self.window)


def sampled(queries: int, keys: int) -> torch.Tensor:
    """Rows that a mask of these sizes is known by, `(rows, 1)`: the last two among them."""
    rows = min(queries, max(_ROWS, _SCORES // keys))
    found = torch.linspace(0, queries - 1, rows).round().long()
    return torch.unique(torch.cat([found, found[-1:] - int(queries > 1)])).unsqueeze(1)


def window_of(allowed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], queries: int, keys: int) -> Window | None:
    """What a mask leaves, if that is a window around each query or before it; None of all other masks.

    Args:
        allowed: of rows `(r, 1)` and columns `(keys,)` whether they count, `(r, keys)`.
    """
    rows, columns = sampled(queries, keys), torch.arange(keys)
    found = allowed(rows, columns).expand(len(rows), keys)
    first, last = int(found[0].sum()), int(found[-1].sum())
    most = max(queries, keys)
    ways = [
        Window(causal, None if window >= most else window)
        for causal, window in ((True, most), (False, most), (True, last), (False, first))
        if window
    ]
    return next((each for each in ways if bool((found == each.mask(rows, columns)).all())), None)
