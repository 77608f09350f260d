"""Topological orders of numbered nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def post_order(roots: Iterable[int], before: Callable[[int], Sequence[int]]) -> list[int]:
    """`roots` and their ancestors in depth-first post-order, those in `before` in their order; cycles are ignored."""
    entered: set[int] = set()
    order: dict[int, None] = {}
    stack = [*roots][::-1]
    while stack:
        one = stack[-1]
        if one in entered:
            order[stack.pop()] = None  # keeps an earlier position
        else:
            entered.add(one)
            stack += [other for other in before(one)[::-1] if other not in entered]
    return list(order)
