"""Random programs of jax: every kind of op, shape and type in any order, and whether the road to a plan holds.

A program is given by a seed and a number of steps; with fewer steps it is the beginning of the same program.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autoshard
from autoshard.cost.predict import Prediction, predict
from autoshard.frontends.stablehlo_file import read_program
from autoshard.mesh import Mesh
from autoshard.program import Program
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.context import mlir_context
from autoshard.stablehlo.reader import build_graph, parse_module
from autoshard.strategies.random_plans import random_annotations

Shape = Sequence[int]
Array = Any
DEVICES = ("cpu", "h100", "tpu-v5e", "tpu-v5p")
MESHES = ((2, 2), (2, 4), (4,), (2, 2, 2), (1, 4), (3,))
EXTENTS = (
    (0, 1, 2, 3, 4),
    (1, 2, 4, 8, 16),
    (1, 4, 8, 16, 64),
    (1, 3, 5, 7, 13, 100, 130),
    (1, 8, 128, 256, 512, 2048),
)
"""Of the dims of one program."""
FLOATS = ("float32", "float32", "bfloat16", "bfloat16", "float16")
WHOLE = ("int32", "int32", "int8", "uint8", "uint32")
WIDE = ("float64", "int64", "uint64")
UNARY = ("exp", "tanh", "neg", "abs", "sqrt", "log", "sin", "logistic", "rsqrt", "cbrt", "erf", "floor", "sign")
UNARY += ("is_finite",)
MOST_ELEMENTS, MOST_DIMS = 2**22, 6
OPS: dict[Callable[[Step, Array], Sequence[Array]], float] = {}


def op(weight: float) -> Callable[[Callable[[Step, Array], Sequence[Array]]], Any]:
    """A step of a program: from one value of it to new ones."""

    def register(function: Callable[[Step, Array], Sequence[Array]]) -> Callable[[Step, Array], Sequence[Array]]:
        OPS[function] = weight
        return function

    return register


class Draft:
    """One program while it is written: its choices, and the arguments that its steps have asked for."""

    def __init__(self, seed: int, steps: int | None) -> None:
        rng = self.rng = random.Random(f"program {seed}")
        self.seed = seed
        self.extents = rng.choice(EXTENTS)
        self.none = rng.choice((0.0, 0.0, 0.05))
        self.wide = rng.random() < 0.1
        self.trained = rng.random() < 0.4
        self.platform = rng.choice(("cpu", "cuda", "tpu"))
        self.started = rng.randrange(4)
        self.returned = rng.randrange(5)
        drawn = rng.randint(1, 14)
        self.steps = drawn if steps is None else steps
        self.asked: dict[str, jax.ShapeDtypeStruct] = {}
        self.arguments: dict[str, Array] = {}

    def grow(self, pool: Sequence[Array], label: str, steps: int) -> list[Array]:
        """The values of `pool` and those of so many steps from them."""
        values = list(pool)
        for number in range(steps):
            step = Step(self, f"{label}.{number}", values)
            (made,) = step.rng.choices(list(OPS), list(OPS.values()))
            values += [
                each for each in made(step, step.pick()) if each.size <= MOST_ELEMENTS and each.ndim <= MOST_DIMS
            ]
        return values

    def run(self, arguments: Sequence[Array]) -> list[Array]:
        """What the program returns."""
        self.arguments = dict(zip(self.asked, arguments, strict=False))
        start = Step(self, "start", [])
        values = self.grow([start.new() for _ in range(self.started)], "", self.steps)
        end = Step(self, "end", values)
        return [*values[-1:], *(end.pick() for _ in range(self.returned if values else 0))]

    def train(self, arguments: Sequence[Array]) -> list[Array]:
        """Arguments after a step along the gradient of the sum of what the program returns, and that sum."""

        def loss(*floats: Array) -> Array:
            given = iter(floats)
            made = self.run([next(given) if is_float(each) else each for each in arguments])
            return sum((jnp.sum(each.astype("float32")) for each in made if is_float(each)), jnp.float32(0))

        floats = [each for each in arguments if is_float(each)]
        if not floats:
            return self.run(arguments)
        value, gradients = jax.value_and_grad(loss, argnums=tuple(range(len(floats))))(*floats)
        new = (each - (0.1 * gradient).astype(each.dtype) for each, gradient in zip(floats, gradients, strict=True))
        return [next(new) if is_float(each) else each for each in arguments] + [value]


class Step:
    """The choices of one step; the same whenever it is traced."""

    def __init__(self, draft: Draft, label: str, pool: Sequence[Array]) -> None:
        self.draft, self.label, self.pool = draft, label, pool
        self.rng = random.Random(f"{draft.seed} {label}")
        self.count = 0

    def pick(self, like: Callable[[Array], bool] = lambda _: True) -> Array:
        """A value so far, late ones more often; an argument where none will do."""
        found = [each for each in self.pool if like(each)]
        if not found or self.rng.random() < 0.1:
            return self.new()
        return found[-1 - min(int(self.rng.expovariate(0.4)), len(found) - 1)]

    def extent(self) -> int:
        return 0 if self.rng.random() < self.draft.none else self.rng.choice(self.draft.extents)

    def dtype(self) -> str:
        where = self.rng.random()
        kinds = FLOATS if where < 0.75 else WHOLE if where < 0.9 else ("bool",)
        return self.rng.choice(WIDE if self.draft.wide and where < 0.5 else kinds)

    def new(self, shape: Shape | None = None, dtype: str | None = None) -> Array:
        """Another argument of the program."""
        if shape is None:
            shape = [self.extent() for _ in range(self.rng.choice((0, 1, 2, 2, 3, 3, 4)))]
            while math.prod(shape) > MOST_ELEMENTS:
                shape[shape.index(max(shape))] = 4
        name = f"{self.label}/{self.count}"
        self.count += 1
        kind = jax.ShapeDtypeStruct(tuple(shape), dtype or self.dtype())
        if name not in self.draft.arguments:
            self.draft.asked[name] = kind
            return jnp.zeros(kind.shape, kind.dtype)
        return self.draft.arguments[name]

    def floating(self, x: Array) -> Array:
        return x if is_float(x) else x.astype(self.rng.choice(FLOATS))

    def ranked(self, x: Array, rank: int) -> Array:
        """The value with so many dims: first ones joined, or new ones of extent 1."""
        if x.ndim > rank:
            joined = x.ndim - rank + 1
            return x.reshape(math.prod(x.shape[:joined]), *x.shape[joined:])
        return x.reshape(*(1 for _ in range(rank - x.ndim)), *x.shape)

    def dim(self, x: Array) -> int:
        return self.rng.randrange(x.ndim)

    def body(self, name: str, values: Sequence[Array], steps: int = 2) -> list[Array]:
        return self.draft.grow(values, f"{self.label}{name}", self.rng.randint(0, steps) if deep(self) else 0)

    def carried(self, name: str, values: Sequence[Array]) -> list[Array]:
        """New values of the same types, made of them."""
        made = self.body(name, values)[::-1]
        return [
            next((new for new in made if new.shape == old.shape and new.dtype == old.dtype and new is not old), old)
            for old in values
        ]


def deep(step: Step) -> bool:
    """Whether a region may have steps of its own: no deeper than three."""
    return step.label.count("/") + sum(map(step.label.count, "wcsbk")) < 3


def is_float(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def is_whole(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.integer))


@op(4)
def elementwise(step: Step, x: Array) -> Sequence[Array]:
    name = step.rng.choice(UNARY)
    return [getattr(lax, name)(step.floating(x))]


@op(4)
def of_two(step: Step, x: Array) -> Sequence[Array]:
    """Operands of equal or broadcast shapes."""
    y = step.pick(lambda y: _fits(x, y))
    if not _fits(x, y):
        y = step.new(x.shape[step.rng.randint(0, x.ndim) :])
    names = ["add", "multiply", "subtract", "maximum", "minimum", "equal", "less", "greater_equal"]
    names += ["power", "arctan2", "divide", "remainder"] if is_float(x) and is_float(y) else []
    names += ["bitwise_and", "bitwise_xor", "left_shift"] if is_whole(x) and is_whole(y) else []
    names += ["logical_or", "logical_and"] if x.dtype == y.dtype == bool else []
    name = step.rng.choice(names)
    if name == "subtract" and bool in (x.dtype, y.dtype):
        name = "not_equal"
    return [getattr(jnp, name)(x, y)]


def _fits(x: Array, y: Array) -> bool:
    try:
        return math.prod(np.broadcast_shapes(x.shape, y.shape)) <= MOST_ELEMENTS
    except ValueError:
        return False


@op(1)
def chosen(step: Step, x: Array) -> Sequence[Array]:
    if step.rng.random() < 0.3:
        return [jnp.clip(step.floating(x), -1, 1)]
    mask = step.pick(lambda y: y.dtype == bool and y.shape == x.shape)
    mask = mask if mask.dtype == bool and mask.shape == x.shape else step.new(x.shape, "bool")
    return [jnp.where(mask, x, step.rng.choice((jnp.zeros_like(x), x[..., ::-1] if x.ndim else x)))]


@op(2)
def converted(step: Step, x: Array) -> Sequence[Array]:
    how = step.rng.random()
    if how < 0.7:
        return [x.astype(step.dtype())]
    if how < 0.85:
        return [lax.reduce_precision(step.floating(x), 8, 7)]
    x = x.astype("float32")
    return [lax.bitcast_convert_type(x, step.rng.choice(("int32", "uint8", "bfloat16")))]


@op(1)
def of_complex(step: Step, x: Array) -> Sequence[Array]:
    z = lax.complex(x := x.astype("float32"), x)
    if x.ndim and x.shape[-1] and step.rng.random() < 0.5:
        z = jnp.fft.fft(z)
    return [lax.real(z * z), lax.imag(z), lax.abs(z)]


@op(1)
def counted(step: Step, x: Array) -> Sequence[Array]:
    if step.rng.random() < 0.5:
        return [lax.population_count(x.astype("int32")), lax.clz(x.astype("int32"))]
    shape = tuple(step.extent() for _ in range(step.rng.randint(1, 2)))
    return [lax.broadcasted_iota(step.rng.choice(("int32", "float32")), shape, step.rng.randrange(len(shape)))]


@op(3)
def reshaped(step: Step, x: Array) -> Sequence[Array]:
    """Dims split, joined, added, in one reshape."""
    shape: list[int] = []
    for extent in x.shape:
        parts = [n for n in (2, 3, 4, 8) if extent and extent % n == 0]
        if parts and step.rng.random() < 0.4:
            part = step.rng.choice(parts)
            shape += step.rng.sample([part, extent // part], 2)
        elif shape and step.rng.random() < 0.4:
            shape[-1] *= extent
        elif extent != 1 or step.rng.random() < 0.5:
            shape.append(extent)
    if step.rng.random() < 0.3:
        shape.insert(step.rng.randint(0, len(shape)), 1)
    return [x.reshape(shape)]


@op(3)
def moved(step: Step, x: Array) -> Sequence[Array]:
    if x.ndim and step.rng.random() < 0.25:
        return [lax.rev(x, step.rng.sample(range(x.ndim), step.rng.randint(1, x.ndim)))]
    return [x.transpose(step.rng.sample(range(x.ndim), x.ndim))]


@op(2)
def sliced(step: Step, x: Array) -> Sequence[Array]:
    starts = [step.rng.randint(0, extent) for extent in x.shape]
    limits = [step.rng.randint(start, extent) for start, extent in zip(starts, x.shape, strict=True)]
    whole = [step.rng.random() < 0.5 for _ in x.shape]
    return [
        lax.slice(
            x,
            [0 if each else start for each, start in zip(whole, starts, strict=True)],
            [
                extent if each else max(limit, min(extent, start + 1))
                for each, limit, start, extent in zip(whole, limits, starts, x.shape, strict=True)
            ],
            [step.rng.choice((1, 1, 2, 3)) for _ in x.shape],
        )
    ]


@op(2)
def padded(step: Step, x: Array) -> Sequence[Array]:
    """Padded or cropped at the ends, and between elements."""
    widths = [
        (step.rng.choice((0, 0, 1, 3, -min(1, extent // 2))), step.rng.choice((0, 0, 1, 2)), step.rng.choice((0, 0, 1)))
        for extent in x.shape
    ]
    return [lax.pad(x, jnp.zeros((), x.dtype), widths)]


@op(2)
def joined(step: Step, x: Array) -> Sequence[Array]:
    x = step.ranked(x, max(1, x.ndim))
    dim = step.dim(x)
    several = [x] * step.rng.randint(1, 2)
    several += [step.new([*x.shape[:dim], step.extent(), *x.shape[dim + 1 :]], str(x.dtype))]
    step.rng.shuffle(several)
    return [jnp.concatenate(several, dim)]


@op(2)
def spread(step: Step, x: Array) -> Sequence[Array]:
    rank = min(MOST_DIMS, x.ndim + step.rng.randint(0, 2))
    dims = sorted(step.rng.sample(range(rank), x.ndim))
    shape = [step.extent() for _ in range(rank)]
    for place, extent in zip(dims, x.shape, strict=True):
        shape[place] = extent if extent != 1 or step.rng.random() < 0.5 else shape[place]
    return [lax.broadcast_in_dim(x, shape, dims)] if math.prod(shape) <= MOST_ELEMENTS else []


@op(3)
def reduced(step: Step, x: Array) -> Sequence[Array]:
    dims = tuple(step.rng.sample(range(x.ndim), step.rng.randint(0, x.ndim)))
    keep = step.rng.random() < 0.3
    name = step.rng.choice(("sum", "mean", "prod", "any", "max", "min", "argmax", "logsumexp", "both"))
    if name in ("max", "min", "argmax", "logsumexp", "both") and not x.size:
        name = "sum"
    if name == "argmax":
        return [jnp.argmax(x, step.dim(x) if x.ndim else None, keepdims=keep)]
    if name == "both":  # two results of one reduce
        x = lax.stop_gradient(step.floating(x))
        zero = jnp.zeros((), x.dtype)
        return lax.reduce((x, x), (zero, zero), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), dims)
    if name == "logsumexp":
        return [jax.scipy.special.logsumexp(step.floating(x), axis=dims, keepdims=keep)]
    return [getattr(jnp, name)(x, axis=dims, keepdims=keep)]


@op(1)
def scanned(step: Step, x: Array) -> Sequence[Array]:
    x = step.floating(step.ranked(x, max(1, x.ndim)))
    name = step.rng.choice(("cumsum", "cumprod", "cummax", "cumlogsumexp"))
    return [getattr(lax, name)(x, step.dim(x), reverse=step.rng.random() < 0.3)]


@op(1)
def windowed(step: Step, x: Array) -> Sequence[Array]:
    x = step.floating(x)
    window = [step.rng.choice((1, 2, 3)) for _ in x.shape]
    stride = [step.rng.choice((1, 2)) for _ in x.shape]
    how, start = step.rng.choice(((lax.add, 0.0), (lax.max, -math.inf), (lax.min, math.inf)))
    padding = step.rng.choice(("SAME", "VALID"))
    return [lax.reduce_window(x, np.array(start, x.dtype), how, tuple(window), tuple(stride), padding)]


@op(1)
def ordered(step: Step, x: Array) -> Sequence[Array]:
    x = step.ranked(x, max(1, x.ndim))
    dim = step.dim(x)
    if x.dtype != bool and step.rng.random() < 0.4 and x.shape[-1]:
        return lax.top_k(x, step.rng.randint(0, min(4, x.shape[-1])))
    index = lax.broadcasted_iota("int32", x.shape, dim)
    return lax.sort((x, index), dimension=dim, num_keys=step.rng.randint(1, 2))


@op(4)
def multiplied(step: Step, x: Array) -> Sequence[Array]:
    """Any dims as batch, any contracted."""
    x = step.floating(x)
    places = step.rng.sample(range(x.ndim), x.ndim)
    batch = places[: step.rng.choice((0, 0, 1, 2))]
    contracted = places[len(batch) :][: step.rng.choice((0, 1, 1, 1, 2))]
    mine = [("b", d) for d in batch] + [("c", d) for d in contracted]
    theirs = mine + [("f", -1)] * step.rng.choice((0, 1, 1, 2))
    step.rng.shuffle(theirs)
    y = step.new([step.extent() if what == "f" else x.shape[d] for what, d in theirs], str(x.dtype))
    numbers = (
        (contracted, [theirs.index(("c", d)) for d in contracted]),
        (batch, [theirs.index(("b", d)) for d in batch]),
    )
    free = math.prod(x.shape[d] for d in range(x.ndim) if d not in contracted)
    if free * y.size > MOST_ELEMENTS * max(1, math.prod(x.shape[d] for d in [*batch, *contracted])):
        return []
    wanted = step.rng.choice((None, None, "float32"))
    return [lax.dot_general(x, y, numbers, preferred_element_type=wanted)]


@op(3)
def convolved(step: Step, x: Array) -> Sequence[Array]:
    """Strided, dilated, grouped, padded, in any order of dims."""
    spatial = step.rng.choice((1, 2, 2, 2, 3))
    x = step.floating(step.ranked(x, spatial + 2))
    letters = "DHW"[3 - spatial :]
    layout = step.rng.choice((f"NC{letters}", f"N{letters}C"))
    kernel = step.rng.choice((f"OI{letters}", f"{letters}IO"))
    channels = x.shape[layout.index("C")]
    divisors = [n for n in (1, 2, 3, 4, channels) if n and channels % n == 0 and channels]
    groups = step.rng.choice(divisors) if channels and step.rng.random() < 0.4 else 1
    sizes = {letter: step.rng.choice((1, 1, 2, 3)) for letter in letters}
    sizes |= {"I": channels // groups, "O": groups * step.rng.choice((1, 2, 4))}
    y = step.new([sizes[letter] for letter in kernel], str(x.dtype))
    if max(sizes["O"], 1) * x.size > 4 * MOST_ELEMENTS:
        return []
    strides = [step.rng.choice((1, 1, 2)) for _ in letters]
    padding = step.rng.choice(
        ("SAME", "VALID", [(step.rng.randint(-1 if x.size else 0, 2), step.rng.randint(0, 2)) for _ in letters])
    )
    dilated = [1] * spatial if isinstance(padding, str) else [step.rng.choice((1, 1, 2)) for _ in letters]
    return [
        lax.conv_general_dilated(
            x,
            y,
            strides,
            padding,
            lhs_dilation=dilated,
            rhs_dilation=[step.rng.choice((1, 1, 2)) for _ in letters],
            dimension_numbers=(layout, kernel, layout),
            feature_group_count=groups,
        )
    ]


def indices(step: Step, shape: Shape) -> Array:
    found = step.pick(lambda y: y.dtype == jnp.int32 and y.size <= 4096)
    return found if found.dtype == jnp.int32 and found.size <= 4096 else step.new(shape, "int32")


@op(3)
def gathered(step: Step, x: Array) -> Sequence[Array]:
    x = step.ranked(x, max(1, x.ndim))
    dim = step.dim(x)
    how = step.rng.randrange(4)
    if not x.shape[dim]:
        return [jnp.take(x, jnp.zeros(step.rng.choice(((0,), (2, 0))), "int32"), axis=dim)]
    if how == 0:
        at = step.new([*x.shape[:dim], step.extent(), *x.shape[dim + 1 :]], "int32")
        return [jnp.take_along_axis(x, at, dim)]
    if how == 1:
        sizes = [step.rng.randint(min(1, extent), extent) for extent in x.shape]
        return [lax.dynamic_slice(x, [step.new((), "int32") for _ in sizes], sizes)]
    at = indices(step, [step.extent() for _ in range(step.rng.randint(0, 2))])
    if how == 2 and x.ndim > 1 and all(x.shape[:2]):
        return [x[at, at]]
    return [jnp.take(x, at, axis=dim)] if at.size * (x.size // x.shape[dim]) <= MOST_ELEMENTS else []


@op(3)
def scattered(step: Step, x: Array) -> Sequence[Array]:
    x = step.ranked(x, max(1, x.ndim))
    how = step.rng.randrange(4)
    if how == 0:
        part = step.new([step.rng.randint(0, extent) for extent in x.shape], str(x.dtype))
        return [lax.dynamic_update_slice(x, part, [step.new((), "int32") for _ in x.shape])]
    at = indices(step, [step.extent() for _ in range(step.rng.randint(0, 2))])
    if not x.shape[0] or at.size * math.prod(x.shape[1:]) > MOST_ELEMENTS:
        return []
    rows = step.new([*at.shape, *x.shape[1:]], str(x.dtype))
    if how == 1 and is_float(x):
        return [jax.ops.segment_sum(rows.reshape(at.size, *x.shape[1:]), at.reshape(-1), step.rng.randint(1, 9))]
    name = step.rng.choice(("set", "add", "max")) if x.dtype != bool else "set"
    x, rows = (x, rows) if name != "max" else (lax.stop_gradient(x), lax.stop_gradient(rows))
    mode = step.rng.choice((None, "drop", "promise_in_bounds"))
    return [getattr(x.at[at], name)(rows, mode=mode, unique_indices=step.rng.random() < 0.2)]


@op(1)
def of_indices(step: Step, x: Array) -> Sequence[Array]:
    at = indices(step, [step.extent()])
    return [jax.nn.one_hot(at, step.rng.randint(0, 16), dtype=step.rng.choice(FLOATS))]


@op(2)
def held(step: Step, x: Array) -> Sequence[Array]:
    """A barrier around one value or several."""
    return lax.optimization_barrier([x, *(step.pick() for _ in range(step.rng.randint(0, 2)))])


@op(1)
def recomputed(step: Step, x: Array) -> Sequence[Array]:
    """A checkpoint."""
    return [jax.checkpoint(lambda *values: step.body("k", values, 4)[-1])(x, step.pick())]


@op(1)
def called(step: Step, x: Array) -> Sequence[Array]:
    return jax.jit(lambda *values: step.body("c", values, 3)[2:])(x, step.pick())


@op(1.5)
def branched(step: Step, x: Array) -> Sequence[Array]:
    values = [x, step.pick()]
    branches = [partial(step.carried, f"b{n}") for n in range(step.rng.randint(1, 3))]
    if len(branches) == 2:
        return lax.cond(step.new((), "bool"), *branches, values)
    return lax.switch(step.new((), "int32"), branches, values)


@op(1)
def repeated(step: Step, x: Array) -> Sequence[Array]:
    """Loops that count, or end when what they hold says so."""
    values = [x, step.pick()]
    if step.rng.random() < 0.5:
        trips = step.rng.choice((0, 1, 3, 100))
        return lax.fori_loop(0, trips, lambda _, values: step.carried("w", values), values)
    values = [lax.stop_gradient(each) for each in values]

    def goes_on(values: Sequence[Array]) -> Array:
        return jnp.sum(values[0].astype("float32")) < 9

    return lax.while_loop(goes_on, lambda values: step.carried("w", values), values)


@op(2)
def over_rows(step: Step, x: Array) -> Sequence[Array]:
    """A scan: rows in, rows out, something carried."""
    x = step.ranked(x, max(1, x.ndim))

    def body(carry: Array, row: Array) -> Any:
        (new, made) = step.carried("s", [carry, row])
        return new, (made, row)

    carry, rows = lax.scan(body, step.pick(), x, reverse=step.rng.random() < 0.3)
    return [carry, *rows]


@op(0.5)
def drawn(step: Step, x: Array) -> Sequence[Array]:
    x = step.floating(x)
    key = jax.random.wrap_key_data(step.new((4,), "uint32"), impl="rbg")
    return [jax.random.bernoulli(key, 0.5, x.shape), jax.random.normal(key, x.shape, x.dtype)]


@op(0.5)
def solved(step: Step, x: Array) -> Sequence[Array]:
    x = x.astype("float32").reshape(-1)[:4]
    square = jnp.outer(x, x) + jnp.eye(x.size)
    factor = lax.linalg.cholesky(square)
    return [factor, lax.linalg.triangular_solve(factor, square, left_side=True, lower=True)]


def random_program(seed: int, steps: int | None = None, platform: str | None = None) -> Program:
    """The program of a seed: `steps` of it, lowered for `platform`; both as the seed says where they are not given."""
    with tempfile.NamedTemporaryFile(suffix=".mlir") as file:
        Path(file.name).write_text(random_module(seed, steps, platform))
        return read_program(file.name)


def random_module(seed: int, steps: int | None = None, platform: str | None = None) -> str:
    """The same as StableHLO."""
    draft = Draft(seed, steps)
    with jax.enable_x64(draft.wide):
        jax.eval_shape(lambda: draft.run([]))  # which arguments there are
        kinds = list(draft.asked.values())
        donated = tuple(i for i, each in enumerate(kinds) if draft.trained and is_float(each))
        function = (lambda *arguments: draft.train(arguments)) if draft.trained else lambda *each: draft.run(each)
        jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
        return str(jitted.trace(*kinds).lower(lowering_platforms=(platform or draft.platform,)).as_text())


def check(program: Program, mesh: Mesh, seed: int) -> None:
    """A plan and a random one: made, predicted, written, and every figure finite and not negative."""
    graph = build_graph(program)
    plan = autoshard.plan_program(program, mesh, time_limit=2.0, memory=None)
    assert autoshard.Plan.from_json(plan.to_json()) == plan
    both = plan.annotations(graph), random_annotations(graph, mesh, seed)
    for each in both:
        check_figures(predict(graph, each, mesh))
    for each in both:
        with mlir_context():
            parse_module(annotate(program, graph, each, mesh))


def check_figures(found: Prediction) -> None:
    """Every one is finite and not negative."""
    named = ("step_time_s", "compute_s", "communication_s", "overlapped_s", "mfu", "peak_memory_bytes")
    figures = {name: getattr(found, name) for name in named}
    figures |= {f"kernel {n}": seconds for n, (_, seconds) in enumerate(found.kernel_s)}
    figures |= {f"collective {n}": seconds for n, seconds in enumerate(found.collective_s)}
    figures |= {f"bytes {n}": each.bytes for n, each in enumerate(found.collectives)}
    figures |= {f"replicated {n}": each.cost_s for n, each in enumerate(found.replicated_ops)}
    wrong = {name: figure for name, figure in figures.items() if not 0 <= figure < math.inf}
    assert not wrong, wrong
