"""Cases that PyTorch writes: an aten op (or a few), forward, and backward where it has a gradient.

All cases of a program are captured at once through torch_xla, as one module with a submodule per case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

Shape = tuple[int, ...]
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Input:
    """An input of a case; `below` is the limit of an integer one."""

    shape: Shape
    below: int = 0

    @property
    def tensor(self) -> torch.Tensor:
        """Its shape and dtype."""
        return torch.empty(self.shape, dtype=torch.long if self.below else torch.float32, device="meta")


@dataclass(frozen=True)
class Drawn:
    """One case: what it computes, of what."""

    function: Function
    inputs: tuple[Input, ...]


FUNCTIONS: dict[str, Callable[[random.Random], Drawn]] = {}


def torch_case(name: str) -> Callable[[Callable[[random.Random], Drawn]], Callable[[random.Random], Drawn]]:
    """Register a function that draws the case of this name."""

    def register(draw: Callable[[random.Random], Drawn]) -> Callable[[random.Random], Drawn]:
        FUNCTIONS[name] = draw
        return draw

    return register


def size(rng: random.Random) -> int:
    """An extent: mostly one that 8 divides."""
    return rng.choice((8, 16, 24, 32, 32, 48, 64, 12, 103, 4))


def sizes(rng: random.Random, count: int) -> Shape:
    """Several extents."""
    return tuple(size(rng) for _ in range(count))


def _pointwise(name: str, function: Function) -> None:
    @torch_case(name)
    def draw(rng: random.Random) -> Drawn:
        return Drawn(function, (Input(sizes(rng, rng.randint(1, 3))),))


for _name, _function in {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "leaky_relu": functional.leaky_relu,
    "square": torch.square,
    "exp": torch.exp,
}.items():
    _pointwise(_name, _function)


def _along(name: str, function: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    @torch_case(name)
    def draw(rng: random.Random) -> Drawn:
        shape = sizes(rng, rng.randint(2, 3))
        dim = rng.randrange(len(shape))
        return Drawn(lambda x: function(x, dim), (Input(shape),))


for _name, _along_dim in {
    "softmax": lambda x, dim: torch.softmax(x, dim),
    "log_softmax": lambda x, dim: torch.log_softmax(x, dim),
    "sum": lambda x, dim: x.sum(dim),
    "mean": lambda x, dim: x.mean(dim, keepdim=True),
    "var": lambda x, dim: x.var(dim),
    "amax": lambda x, dim: x.amax(dim),
    "logsumexp": lambda x, dim: torch.logsumexp(x, dim),
    "cumsum": lambda x, dim: torch.cumsum(x, dim),
    "flip": lambda x, dim: torch.flip(x, (dim,)),
    "norm": lambda x, dim: functional.normalize(x, dim=dim),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim) * 2,
    "roll": lambda x, dim: torch.roll(x, 1, dim),
}.items():
    _along(_name, _along_dim)


@torch_case("linear")
def linear(rng: random.Random) -> Drawn:
    k, n = sizes(rng, 2)
    return Drawn(functional.linear, (Input((*sizes(rng, rng.randint(1, 2)), k)), Input((n, k)), Input((n,))))


@torch_case("matmul")
def matmul(rng: random.Random) -> Drawn:
    m, k, n = sizes(rng, 3)
    return Drawn(torch.matmul, (Input((m, k)), Input((k, n))))


@torch_case("bmm")
def bmm(rng: random.Random) -> Drawn:
    b, m, k, n = sizes(rng, 4)
    return Drawn(torch.bmm, (Input((b, m, k)), Input((b, k, n))))


@torch_case("einsum")
def einsum(rng: random.Random) -> Drawn:
    b, s, h, d, t = *sizes(rng, 2), 8, 16, size(rng)
    return Drawn(lambda q, k: torch.einsum("bshd,bthd->bhst", q, k), (Input((b, s, h, d)), Input((b, t, h, d))))


@torch_case("attention")
def attention(rng: random.Random) -> Drawn:
    b, h, s, d = rng.choice((4, 8)), rng.choice((4, 8)), rng.choice((16, 32)), 16
    each = Input((b, h, s, d))
    return Drawn(functional.scaled_dot_product_attention, (each, each, each))


@torch_case("layer_norm")
def layer_norm(rng: random.Random) -> Drawn:
    shape = sizes(rng, 3)
    width = shape[-1:]
    return Drawn(lambda x, w, b: functional.layer_norm(x, width, w, b), (Input(shape), Input(width), Input(width)))


@torch_case("rms_norm")
def rms_norm(rng: random.Random) -> Drawn:
    shape = sizes(rng, 3)
    return Drawn(
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, (Input(shape), Input(shape[-1:]))
    )


@torch_case("embedding")
def embedding(rng: random.Random) -> Drawn:
    rows, width = sizes(rng, 2)
    return Drawn(lambda w, i: functional.embedding(i, w), (Input((rows, width)), Input(sizes(rng, 2), rows)))


@torch_case("cross_entropy")
def cross_entropy(rng: random.Random) -> Drawn:
    rows, classes = sizes(rng, 2)
    return Drawn(functional.cross_entropy, (Input((rows, classes)), Input((rows,), classes)))


@torch_case("cat")
def cat(rng: random.Random) -> Drawn:
    shape = sizes(rng, 2)
    dim = rng.randrange(2)
    return Drawn(lambda x, y: torch.cat((x, y), dim), (Input(shape), Input(shape)))


@torch_case("chunk")
def chunk(rng: random.Random) -> Drawn:
    m, n = sizes(rng, 2)
    return Drawn(lambda x: torch.chunk(x, 3, -1)[1] * 2, (Input((m, 3 * n)),))


@torch_case("heads")
def heads(rng: random.Random) -> Drawn:
    b, s = sizes(rng, 2)
    return Drawn(lambda x: x.view(b, s, 8, 16).transpose(1, 2) * 2, (Input((b, s, 128)),))


@torch_case("merge")
def merge(rng: random.Random) -> Drawn:
    b, s = sizes(rng, 2)
    return Drawn(lambda x: x.transpose(1, 2).reshape(b, s, 128) * 2, (Input((b, 8, s, 16)),))


@torch_case("pad")
def pad(rng: random.Random) -> Drawn:
    return Drawn(lambda x: functional.pad(x, (1, 1)), (Input(sizes(rng, 2)),))


@torch_case("tril")
def tril(rng: random.Random) -> Drawn:
    return Drawn(torch.tril, (Input(sizes(rng, 2)),))


@torch_case("masked_fill")
def masked_fill(rng: random.Random) -> Drawn:
    shape = sizes(rng, 2)
    return Drawn(lambda x, y: x.masked_fill(y > 0, 0.0), (Input(shape), Input(shape)))


@torch_case("index_select")
def index_select(rng: random.Random) -> Drawn:
    shape = sizes(rng, 2)
    return Drawn(lambda x, i: torch.index_select(x, 0, i), (Input(shape), Input((size(rng),), shape[0])))


@torch_case("gather")
def gather(rng: random.Random) -> Drawn:
    m, n = sizes(rng, 2)
    return Drawn(lambda x, i: torch.gather(x, 1, i), (Input((m, n)), Input((m, size(rng)), n)))


@torch_case("broadcast")
def broadcast(rng: random.Random) -> Drawn:
    m, n = sizes(rng, 2)
    return Drawn(lambda x, y: x * y, (Input((m, 1)), Input((m, n))))


@torch_case("rotary")
def rotary(rng: random.Random) -> Drawn:
    b, s = sizes(rng, 2)

    def turned(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * cos

    return Drawn(turned, (Input((b, s, 16)), Input((s, 16))))


@torch_case("swiglu")
def swiglu(rng: random.Random) -> Drawn:
    m, k, n = sizes(rng, 3)
    return Drawn(lambda x, a, b: functional.silu(x @ a) * (x @ b), (Input((m, k)), Input((k, n)), Input((k, n))))


class Cases(torch.nn.Module):
    """Every case's function on inputs of its own; with gradients of the float inputs where `backward`."""

    def __init__(self, drawn: Sequence[Drawn], backward: Sequence[bool]) -> None:
        """For these cases; each takes its inputs and, if differentiated, the gradient of its output behind them."""
        super().__init__()
        self.drawn, self.backward = tuple(drawn), tuple(backward)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The results of all cases."""
        rest = list(inputs)
        results: list[torch.Tensor] = []
        for drawn, backward in zip(self.drawn, self.backward, strict=True):
            mine = [rest.pop(0) for _ in drawn.inputs]
            if not backward:
                results.append(drawn.function(*mine))
                continue
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in mine]
                made = drawn.function(*leaves)
                wanted = [x for x in leaves if x.is_floating_point()]
                gradients = torch.autograd.grad(made, wanted, rest.pop(0), allow_unused=True)
                results.extend(each for each in gradients if each is not None)
        return results


def gradient_of(drawn: Drawn) -> Input:
    """The input that stands for the gradient of a case's output."""
    return Input(tuple(drawn.function(*(each.tensor for each in drawn.inputs)).shape))
