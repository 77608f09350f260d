"""Chains of matrix products of drawn sizes, as StableHLO: kernels on their own, some of whose arrays stay on chip."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

CHAINS, LARGEST, MOST = 4, 4e8, 2**39
"""Chains of a module; bytes of an array, and multiply-adds of a product, at most."""

Chain = tuple[tuple[int, ...], tuple[int, int, int], str, tuple[bool, bool], bool]
"""Batch and rows, widths, dtype, which weights are transposed, whether the first weight's gradient is computed."""


def size(of: random.Random, least: int, most: int) -> int:
    """A size that is a power of two, a multiple of 64 (of 16 below) or any, evenly over the orders of magnitude."""
    drawn = least * (most / least) ** of.random()
    kind = of.random()
    if kind < 0.35:
        return 1 << round(drawn).bit_length() - 1
    step = 64 if drawn >= 64 else 16
    return max(least, round(drawn / step) * step) if kind < 0.8 else round(drawn)


def chain(of: random.Random) -> Chain:
    """One chain of two products."""
    while True:
        batch = () if of.random() < 0.75 else (2 ** of.randint(1, 7),)
        rows = size(of, 64, 4096 if batch else 32768)
        first, middle, last = (size(of, 32, 4096 if batch else 16384) for _ in range(3))
        dtype = "bfloat16" if of.random() < 0.65 else "float32"
        count = batch[0] if batch else 1
        most = count * max(rows * max(first, middle, last), first * middle, middle * last)
        turned = (of.random() < 0.5, of.random() < 0.5)
        if 4 * most <= LARGEST and count * rows * middle * max(first, last) <= MOST:
            return (*batch, rows), (first, middle, last), dtype, turned, of.random() < 0.5


def module(seed: int) -> bytes:
    """A StableHLO module of several chains."""
    of = random.Random(seed)
    chains = [chain(of) for _ in range(CHAINS)]
    shapes: list[jax.ShapeDtypeStruct] = []
    for (*batch, rows), widths, dtype, turned, _ in chains:
        shapes.append(jax.ShapeDtypeStruct((*batch, rows, widths[0]), jnp.dtype(dtype)))
        for place, swapped in enumerate(turned):
            pair = widths[place : place + 2]
            shapes.append(jax.ShapeDtypeStruct((*batch, *(reversed(pair) if swapped else pair)), jnp.dtype(dtype)))

    def computed(*given: Any) -> list[Any]:
        left = list(given)
        return [made for drawn in chains for made in _products(drawn, [left.pop(0) for _ in range(3)])]

    text: str = jax.jit(computed).lower(*shapes).as_text()
    return text.encode()


def _products(drawn: Chain, arrays: Sequence[Any]) -> list[Any]:
    (*batch, _), _, _, turned, gradient = drawn
    x, *weights = arrays
    dim = len(batch)
    both = tuple(range(dim))
    read, found = x, []
    for weight, swapped in zip(weights, turned, strict=True):
        dims = (((dim + 1,), (dim + 1 if swapped else dim,)), (both, both))
        read = jax.lax.optimization_barrier(jax.lax.dot_general(read, weight, dims, preferred_element_type=x.dtype))
        found.append(read)
    if gradient:
        dims = (((dim,), (dim,)), (both, both))
        found.append(jax.lax.dot_general(x, found[0], dims, preferred_element_type=x.dtype))
    return found[1:]
