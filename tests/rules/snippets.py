"""Small programs around one op kind each, drawn from a seed: the cases that rules are held against compilers with.

A *builder* draws shapes and attributes and writes the op under `Body`; every op kind that has a rule has one (or a
reason not to, in `WITHOUT`). Builders are in `snippets_*.py`, by the families of `autoshard/graph/rules*.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoshard.program import TensorType

Shape = tuple[int, ...]
Builder = Callable[["Body", "Draw"], None]

BUILDERS: dict[str, Builder] = {}
WITHOUT: dict[str, str] = {}
"""Kinds with a rule and without a case: why."""

EVEN = (8, 16, 24, 32, 40, 64)
UNEVEN = (12, 20, 50, 99, 103, 127, 199)
SMALL = (2, 3, 4, 5, 6)
UNEVEN_SEEDS = 1000
"""Seeds from here on draw half of their extents from `UNEVEN`."""
MAX_ELEMENTS = 1 << 16


def case(*kinds: str) -> Callable[[Builder], Builder]:
    """Register a function as the builder of these op kinds; `Draw.kind` says which is wanted."""

    def register(function: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(kinds, function))
        return function

    return register


@dataclass(frozen=True)
class Ref:
    """A value of the program: its MLIR name and its type."""

    name: str
    type: TensorType

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.type.shape

    @property
    def text(self) -> str:
        """Its type in MLIR."""
        return mlir_type(self.type)


@dataclass(frozen=True)
class Fill:
    """How an argument's numbers are drawn when the program runs.

    Attributes:
        how: `normal`, `positive` (0.5 to 2), `negative`, `unit` (-0.9 to 0.9), `above one`, `near one`, `one`, `ints`
            (0 to `below` - 1), `bools`, `spd` (positive definite matrices), `triangle` (well-conditioned lower
            triangles), `state` (of a random generator).
    """

    how: str = "normal"
    below: int = 100


class Draw:
    """Random shapes and choices of one case.

    Attributes:
        kind: the op kind that is wanted.
        scale: what extents of at least 8 are multiplied by (larger tensors for compilers that treat small ones apart).
    """

    def __init__(self, kind: str, seed: int, scale: int = 1) -> None:
        """The draw of case (`kind`, `seed`)."""
        self.kind = kind
        self.rng = random.Random(f"{kind}:{seed}")
        self.uneven = 0.5 if seed >= UNEVEN_SEEDS else 0.15
        self.scale = scale

    def chance(self, part: float) -> bool:
        """True in this part of the draws."""
        return self.rng.random() < part

    def one(self, options: Sequence[int]) -> int:
        """One of several."""
        return self.rng.choice(options)

    def dim(self, uneven: float | None = None, small: float = 0.1) -> int:
        """An extent: mostly one that 8 divides."""
        where = self.rng.random()
        uneven = self.uneven if uneven is None else max(uneven, self.uneven - 0.15)
        if where < small:
            return self.rng.choice(SMALL)
        if where < small + uneven:
            return self.rng.choice(UNEVEN)
        return self.rng.choice(EVEN) * self.scale

    def shape(self, low: int = 1, high: int = 4) -> Shape:
        """A shape of a rank from `low` to `high`."""
        rank = self.rng.randint(low, high)
        while True:
            found = tuple(self.dim() for _ in range(rank))
            if math.prod(found) <= MAX_ELEMENTS * self.scale**2:
                return found

    def dims(self, rank: int, low: int = 1, high: int | None = None) -> tuple[int, ...]:
        """Some of `rank` dims, in order."""
        count = self.rng.randint(low, rank if high is None else min(high, rank))
        return tuple(sorted(self.rng.sample(range(rank), count)))


@dataclass
class Body:
    """The lines of one case; names start with `prefix`, aten ops count from `first`.

    Attributes:
        arguments: with the numbers to run with.
        outputs: aten op -> types of its outputs.
        returned: what the program returns.
        approximate: largest difference to the unsharded numbers, relative to the largest, that rounding may make.
    """

    prefix: str
    first: int
    arguments: list[tuple[Ref, Fill]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    outputs: list[tuple[str, tuple[TensorType, ...]]] = field(default_factory=list)
    returned: list[Ref] = field(default_factory=list)
    approximate: float = 1e-5
    names: int = 0

    def new(self, shape: Shape, dtype: str) -> Ref:
        """A name that is not taken."""
        self.names += 1
        return Ref(f"%{self.prefix}_{self.names}", TensorType(tuple(shape), dtype))

    def arg(self, shape: Sequence[int], dtype: str = "f32", how: str = "normal", below: int = 100) -> Ref:
        """An argument."""
        ref = self.new(tuple(shape), dtype)
        self.arguments.append((ref, Fill(how, below)))
        return ref

    def const(self, text: str, shape: Sequence[int] = (), dtype: str = "f32") -> Ref:
        """A constant."""
        ref = self.new(tuple(shape), dtype)
        self.lines.append(f"{ref.name} = stablehlo.constant dense<{text}> : {ref.text}")
        return ref

    def op(
        self,
        name: str,
        operands: Sequence[Ref],
        results: Sequence[tuple[Sequence[int], str]],
        attrs: str = "",
        regions: str = "",
        keep: bool = True,
    ) -> list[Ref]:
        """One op, an aten op of its own; its results, which the program returns if `keep`."""
        made = [self.new(tuple(shape), dtype) for shape, dtype in results]
        index = self.first + len(self.outputs)
        dialect = name if "." in name else f"stablehlo.{name}"
        kinds = ", ".join(ref.text for ref in operands)
        result = f"{made[0].name}:{len(made)}" if len(made) > 1 else made[0].name
        into = ", ".join(ref.text for ref in made)
        self.lines.append(
            f'{result} = "{dialect}"({", ".join(ref.name for ref in operands)}) {regions} {{{attrs}}} : '
            f'({kinds}) -> {into if len(made) == 1 else f"({into})"} loc("op{index}")'
        )
        found = []
        for place, ref in enumerate(made):
            source = f"{made[0].name}#{place}" if len(made) > 1 else ref.name
            marked = Ref(f"{ref.name}m", ref.type)
            self.lines.append(
                f'{marked.name} = stablehlo.custom_call @Sharding({source}) {{mhlo.sharding = "{{replicated}}"}} : '
                f'({ref.text}) -> {ref.text} loc("op{index}.out{place}")'
            )
            found.append(marked)
        self.outputs.append((name, tuple(ref.type for ref in made)))
        if keep:
            self.returned.extend(found)
        return found

    def one(
        self,
        name: str,
        operands: Sequence[Ref],
        shape: Sequence[int],
        dtype: str = "f32",
        attrs: str = "",
        regions: str = "",
        keep: bool = True,
    ) -> Ref:
        """`op` with one result."""
        return self.op(name, operands, [(shape, dtype)], attrs, regions, keep)[0]

    def read(self, ref: Ref, draw: Draw) -> None:
        """Give `ref` a reader that no kernel shares with it, so that strategies may scatter its sum."""
        self.returned.remove(ref)
        if not ref.shape or ref.type.dtype != "f32":
            self.one("negate", [ref], ref.shape, ref.type.dtype)
            return
        dim = draw.one(range(len(ref.shape)))
        other = list(ref.shape)
        other[dim] = 8
        whole = list(ref.shape)
        whole[dim] += 8
        self.one("concatenate", [ref, self.arg(other)], whole, attrs=f"dimension = {dim} : i64")


def mlir_type(kind: TensorType) -> str:
    """A tensor type in MLIR."""
    return f"tensor<{'x'.join(map(str, (*kind.shape, kind.dtype)))}>"


def i64s(values: Sequence[int]) -> str:
    """A dense array attribute."""
    return f"array<i64: {', '.join(map(str, values))}>" if values else "array<i64>"


def region(name: str, dtypes: Sequence[str]) -> str:
    """A region that combines an accumulator and an element of each of `dtypes` with one op (or takes the element)."""
    scalars = [f"tensor<{dtype}>" for dtype in dtypes]
    count = len(scalars)
    args = ", ".join(f"%l{i}: {kind}" for i, kind in enumerate(scalars))
    args += "".join(f", %r{i}: {kind}" for i, kind in enumerate(scalars))
    if name == "assign":
        body = f"stablehlo.return {', '.join(f'%r{i}' for i in range(count))} : {', '.join(scalars)}"
    else:
        lines = [f"%o{i} = stablehlo.{name} %l{i}, %r{i} : {kind}" for i, kind in enumerate(scalars)]
        body = "\n".join(lines) + f"\nstablehlo.return {', '.join(f'%o{i}' for i in range(count))} : "
        body += ", ".join(scalars)
    return f"({{\n^bb0({args}):\n{body}\n}})"


IDENTITY = {"add": "0.0", "maximum": "0xFF800000", "minimum": "0x7F800000", "multiply": "1.0"}
