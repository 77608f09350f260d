"""Cases that PyTorch writes, further: convolutions, pools, indexing, sorting, random numbers, interpolation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tests.rules.torch_cases import FUNCTIONS, Drawn, Function, Input, Shape, size, sizes, torch_case

__all__ = ["FUNCTIONS"]

Draw = random.Random


def small(rng: Draw) -> int:
    """An extent of space."""
    return rng.choice((8, 12, 16))


def image(rng: Draw, rank: int = 2) -> Shape:
    """A batch of images: few elements, most extents divisible."""
    return (rng.choice((8, 16)), rng.choice((8, 16)), *(small(rng) for _ in range(rank)))


# ---- convolutions ----------------------------------------------------------------------------------------------------


def _convolution(name: str, function: Function, weight: Callable[[Draw, int], Shape], rank: int = 2) -> None:
    @torch_case(name)
    def draw(rng: Draw) -> Drawn:
        shape = image(rng, rank)
        return Drawn(function, (Input(shape), Input(weight(rng, shape[1]))))


def out(rng: Draw) -> int:
    """Output features."""
    return rng.choice((8, 16, 32))


_convolution("conv1d", lambda x, w: functional.conv1d(x, w, padding=1), lambda r, c: (out(r), c, 3), 1)
_convolution("conv2d", lambda x, w: functional.conv2d(x, w, padding=1), lambda r, c: (out(r), c, 3, 3))
_convolution("conv2d_stride", lambda x, w: functional.conv2d(x, w, stride=2), lambda r, c: (out(r), c, 2, 2))
_convolution("conv2d_one", functional.conv2d, lambda r, c: (out(r), c, 1, 1))
_convolution("conv3d", lambda x, w: functional.conv3d(x, w, padding=1), lambda r, c: (8, c, 3, 3, 3), 3)
_convolution(
    "conv_dilated", lambda x, w: functional.conv1d(x, w, padding=2, dilation=2), lambda r, c: (out(r), c, 3), 1
)
_convolution(
    "conv_depthwise",
    lambda x, w: functional.conv2d(x, w, padding=1, groups=x.shape[1]),
    lambda r, c: (c * r.choice((1, 2)), 1, 3, 3),
)
_convolution(
    "conv_grouped", lambda x, w: functional.conv2d(x, w, padding=1, groups=4), lambda r, c: (out(r), c // 4, 3, 3)
)
_convolution(
    "conv_transpose",
    lambda x, w: functional.conv_transpose2d(x, w, stride=2, padding=1),
    lambda r, c: (c, out(r), 4, 4),
)


# ---- pools, interpolation, rearranging -------------------------------------------------------------------------------


def _imaged(name: str, function: Function, rank: int = 2) -> None:
    @torch_case(name)
    def draw(rng: Draw) -> Drawn:
        return Drawn(function, (Input(image(rng, rank)),))


for _name, _function in {
    "max_pool": lambda x: functional.max_pool2d(x, 2),
    "max_pool_overlap": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: functional.avg_pool2d(x, 2),
    "adaptive_avg_pool": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool_four": lambda x: functional.adaptive_avg_pool2d(x, 4),
    "nearest": lambda x: functional.interpolate(x, scale_factor=2),
    "bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "reflect": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "group_norm": lambda x: functional.group_norm(x, 4),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: functional.instance_norm(x),
    "windows": lambda x: (
        x.reshape(*x.shape[:2], x.shape[2] // 4, 4, x.shape[3] // 4, 4).permute(0, 2, 4, 1, 3, 5).flatten(0, 2) * 2
    ),
}.items():
    _imaged(_name, _function)
_imaged("max_pool1d", lambda x: functional.max_pool1d(x, 2), 1)
_imaged("avg_pool3d", lambda x: functional.avg_pool3d(x, 2), 3)


# ---- indexing --------------------------------------------------------------------------------------------------------


@torch_case("index_rows")
def index_rows(rng: Draw) -> Drawn:
    shape = sizes(rng, 2)
    return Drawn(lambda x, i: x[i], (Input(shape), Input(sizes(rng, 2), shape[0])))


@torch_case("index_middle")
def index_middle(rng: Draw) -> Drawn:
    shape = sizes(rng, 3)
    return Drawn(lambda x, i: x[:, i], (Input(shape), Input((size(rng),), shape[1])))


@torch_case("index_pairs")
def index_pairs(rng: Draw) -> Drawn:
    m, n, k = sizes(rng, 3)
    count = size(rng)
    return Drawn(lambda x, i, j: x[i, j], (Input((m, n, k)), Input((count,), m), Input((count,), n)))


@torch_case("index_put")
def index_put(rng: Draw) -> Drawn:
    m, n = sizes(rng, 2)
    count = size(rng)
    return Drawn(
        lambda x, v, i: torch.index_put(x, (i,), v, accumulate=True),
        (Input((m, n)), Input((count, n)), Input((count,), m)),
    )


@torch_case("index_add")
def index_add(rng: Draw) -> Drawn:
    m, n = sizes(rng, 2)
    count = size(rng)
    return Drawn(lambda x, v, i: torch.index_add(x, 0, i, v), (Input((m, n)), Input((count, n)), Input((count,), m)))


@torch_case("scatter_add")
def scatter_add(rng: Draw) -> Drawn:
    m, n = sizes(rng, 2)
    count = size(rng)
    return Drawn(
        lambda x, v, i: torch.scatter_add(x, 0, i, v), (Input((m, n)), Input((count, n)), Input((count, n), m))
    )


@torch_case("take_along")
def take_along(rng: Draw) -> Drawn:
    m, n = sizes(rng, 2)
    return Drawn(lambda x, i: torch.take_along_dim(x, i, 1), (Input((m, n)), Input((m, 4), n)))


@torch_case("gather_rows")
def gather_rows(rng: Draw) -> Drawn:
    b, m, n = rng.choice((8, 16)), rng.choice((8, 24)), rng.choice((8, 16))
    return Drawn(lambda x, i: torch.gather(x, 1, i), (Input((b, m, n)), Input((b, 8, n), m)))


@torch_case("embedding_bag")
def embedding_bag(rng: Draw) -> Drawn:
    rows, width = sizes(rng, 2)
    return Drawn(
        lambda w, i: functional.embedding_bag(i, w, mode="sum"), (Input((rows, width)), Input(sizes(rng, 2), rows))
    )


@torch_case("one_hot")
def one_hot(rng: Draw) -> Drawn:
    m, n, classes = sizes(rng, 3)
    return Drawn(
        lambda w, i: functional.one_hot(i, classes).to(w.dtype) @ w, (Input((classes, n)), Input((m,), classes))
    )


@torch_case("slice_scatter")
def slice_scatter(rng: Draw) -> Drawn:
    m, n = sizes(rng, 2)
    return Drawn(lambda x, y: torch.slice_scatter(x, y, 1, 1, n - 1), (Input((m, n)), Input((m, n - 2))))


# ---- order -----------------------------------------------------------------------------------------------------------


def _ordered(name: str, function: Callable[[torch.Tensor, int], Any]) -> None:
    @torch_case(name)
    def draw(rng: Draw) -> Drawn:
        shape = sizes(rng, 2)
        dim = rng.randrange(2)
        return Drawn(lambda x: function(x, dim), (Input(shape),))


for _name, _sorted in {
    "sort": lambda x, dim: torch.sort(x, dim)[0],
    "top_k": lambda x, dim: torch.topk(x, 4, dim)[0],
    "max": lambda x, dim: torch.max(x, dim)[0],
    "cumprod": lambda x, dim: torch.cumprod(x * 0.01 + 1, dim),
    "prod": lambda x, dim: torch.prod(x * 0.01 + 1, dim),
    "repeat_interleave": lambda x, dim: torch.repeat_interleave(x, 3, dim),
    "glu": lambda x, dim: functional.glu(torch.cat((x, x), dim), dim),
    "narrow": lambda x, dim: x.narrow(dim, 1, 2),
    "stack": lambda x, dim: torch.stack((x, x * 2), dim),
    "split": lambda x, dim: torch.split(x, (1, x.shape[dim] - 1), dim)[1] * 2,
}.items():
    _ordered(_name, _sorted)
