"""Orders in which numbered things may follow one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def post_order(roots: Iterable[int], before: Callable[[int], Sequence[int]]) -> list[int]:
    """What `roots` need, depth first, each behind what is `before` it, the first of that first; nothing in a circle."""
    entered: set[int] = set()
    order: dict[int, None] = {}
    stack = [*roots][::-1]
    while stack:
        one = stack[-1]
        if one in entered:
            order[stack.pop()] = None  # where it stands already it stays
        else:
            entered.add(one)
            stack += [other for other in before(one)[::-1] if other not in entered]
    return list(order)
