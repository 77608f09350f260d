"""Convolutions of drawn sizes with both gradients, as StableHLO: what one device computes, on its own."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp

COUNT, LARGEST, MOST = 3, 1e8, 2**35
"""Convolutions of a module; bytes of an array, and multiply-adds of one, at most."""

FEATURES = (3, 4, 16, 32, 48, 64, 64, 96, 128, 128, 160, 192, 256, 256, 320, 384, 512, 640, 768, 1024, 1280)
WINDOWS = ((1, 1), (1, 1), (1, 2), (2, 2), (3, 1), (3, 1), (3, 1), (3, 1), (3, 2), (4, 2), (5, 1), (7, 1), (7, 2))
"""Of a window and its stride."""

Convolution = tuple[int, int, int, int, int, int, str]
"""Images, pixels along a side, features read and made, window, stride, dtype."""


def convolution(of: random.Random) -> Convolution:
    """One convolution."""
    while True:
        images = 2 ** of.randint(0, 5)
        pixels = of.choice((8, 14, 16, 28, 32, 56, 64, 112, 128)) if of.random() < 0.8 else of.randint(8, 128)
        read, made = of.choice(FEATURES), of.choice(FEATURES[2:])
        window, stride = of.choice(WINDOWS)
        area = images * pixels**2
        if 4 * area * max(read, made) <= LARGEST and area * read * made * window**2 / stride**2 <= MOST:
            return images, pixels, read, made, window, stride, "bfloat16" if of.random() < 0.5 else "float32"


def module(seed: int) -> bytes:
    """A StableHLO module of several convolutions."""
    of = random.Random(seed)
    drawn = [convolution(of) for _ in range(COUNT)]
    shapes = []
    for images, pixels, read, made, window, stride, dtype in drawn:
        out = (pixels + 2 * _padding(window) - window) // stride + 1
        for shape in ((images, read, pixels, pixels), (made, read, window, window), (images, made, out, out)):
            shapes.append(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))

    def computed(*given: Any) -> list[Any]:
        left, found = list(given), []
        for *_, window, stride, _ in drawn:
            x, weight, gradient = (left.pop(0) for _ in range(3))
            result, back = jax.vjp(lambda x, weight, of=(window, stride): _convolved(x, weight, *of), x, weight)
            found += [result, *back(gradient)]
        return found

    text: str = jax.jit(computed).lower(*shapes).as_text()
    return text.encode()


def _padding(window: int) -> int:
    """As nets pad: images keep their size, or are halved."""
    return (window - 1) // 2


def _convolved(x: jax.Array, weight: jax.Array, window: int, stride: int) -> jax.Array:
    sides, pad = (stride, stride), (_padding(window),) * 2
    return jax.lax.conv_general_dilated(x, weight, sides, (pad, pad), dimension_numbers=("NCHW", "OIHW", "NCHW"))
