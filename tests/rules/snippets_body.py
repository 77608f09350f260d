"""Cases of `graph/rules/body.py`: loops that carry tensors through products, sums and slices, and branches."""

from __future__ import annotations

from collections.abc import Sequence

from tests.rules.snippets import Body, Draw, Ref, case, i64s


class Region:
    """The lines of a region, all labelled as the op that holds them."""

    def __init__(self, body: Body) -> None:
        """A region of the op that `body` writes next."""
        self.body = body
        self.label = f'loc("op{body.first + len(body.outputs)}")'
        self.lines: list[str] = []

    def new(self, shape: Sequence[int], dtype: str = "f32") -> Ref:
        """A name."""
        return self.body.new(tuple(shape), dtype)

    def op(self, name: str, operands: Sequence[Ref], shape: Sequence[int], attrs: str = "", dtype: str = "f32") -> Ref:
        """One op."""
        made = self.new(shape, dtype)
        kinds = ", ".join(ref.text for ref in operands)
        self.lines.append(
            f'{made.name} = "stablehlo.{name}"({", ".join(ref.name for ref in operands)}) {{{attrs}}} : '
            f"({kinds}) -> {made.text} {self.label}"
        )
        return made

    def number(self, value: int) -> Ref:
        """A whole number."""
        made = self.new((), "i32")
        self.lines.append(f"{made.name} = stablehlo.constant dense<{value}> : tensor<i32> {self.label}")
        return made

    def dot(self, left: Ref, right: Ref) -> Ref:
        """A product of matrices."""
        numbers = "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]"
        shape = (left.shape[0], right.shape[1])
        return self.op("dot_general", [left, right], shape, f"dot_dimension_numbers = #stablehlo.dot<{numbers}>")

    def row(self, stacked: Ref, at: Ref) -> Ref:
        """What a loop reads of a stack: its part of this iteration."""
        sizes = (1, *stacked.shape[1:])
        starts = [at, *(self.number(0) for _ in sizes[1:])]
        taken = self.op("dynamic_slice", [stacked, *starts], sizes, f"slice_sizes = {i64s(sizes)}")
        return self.op("reshape", [taken], sizes[1:])

    def store(self, stacked: Ref, row: Ref, at: Ref) -> Ref:
        """A stack with this iteration's part written."""
        part = self.op("reshape", [row], (1, *row.shape))
        starts = [at, *(self.number(0) for _ in row.shape)]
        return self.op("dynamic_update_slice", [stacked, part, *starts], stacked.shape)

    def done(self, arguments: Sequence[Ref], results: Sequence[Ref]) -> str:
        """The region as text."""
        head = f"^bb0({', '.join(f'{ref.name}: {ref.text}' for ref in arguments)}):\n" if arguments else ""
        kinds = ", ".join(ref.text for ref in results)
        lines = "\n".join(self.lines)
        return f"{{\n{head}{lines}\nstablehlo.return {', '.join(ref.name for ref in results)} : {kinds}\n}}"


@case("while")
def loop(body: Body, draw: Draw) -> None:
    rows, width, hidden, trips = draw.dim(), draw.dim(), draw.dim(), draw.one((2, 3, 5))
    while rows * max(width, hidden) > 1 << 12:
        rows = 8
        width, hidden = min(width, 64), min(hidden, 64)
    first = body.const("0", (), "i32")
    carried = [body.arg((rows, width)), body.arg((trips, width, hidden)), body.arg((trips, hidden, width))]
    which = draw.one((0, 1, 2))
    if which == 1:  # elementwise, with what it made of each iteration kept
        carried = [body.arg((rows, width)), body.arg((trips, rows, width))]
    elif which == 2:  # a sum along a dim
        carried = [body.arg((rows, width)), body.arg((rows,))]
    inside = Region(body)
    count, *values = arguments = [inside.new(ref.shape, ref.type.dtype) for ref in (first, *carried)]
    if which == 0:
        into = inside.op("tanh", [inside.dot(values[0], inside.row(values[1], count))], (rows, hidden))
        out = inside.op("add", [values[0], inside.dot(into, inside.row(values[2], count))], (rows, width))
        results = [out, *values[1:]]
    elif which == 1:
        now = inside.op("tanh", [inside.op("add", values[:1] * 2, (rows, width))], (rows, width))
        results = [now, inside.store(values[1], now, count)]
    else:
        spread = inside.op("broadcast_in_dim", values[1:], (rows, width), "broadcast_dimensions = array<i64: 0>")
        results = [inside.op("multiply", [values[0], spread], (rows, width)), values[1]]
    following = inside.op("add", [count, inside.number(1)], (), dtype="i32")
    text = inside.done(arguments, [following, *results])
    until = Region(body)
    tested = [until.new(ref.shape, ref.type.dtype) for ref in (first, *carried)]
    less = "comparison_direction = #stablehlo<comparison_direction LT>"
    condition = until.done(tested, [until.op("compare", [tested[0], until.number(trips)], (), less, "i1")])
    kinds = [((), "i32"), *((ref.shape, "f32") for ref in carried)]
    body.approximate = 1e-4
    made = body.op("while", [first, *carried], kinds, regions=f"({condition}, {text})", keep=False)
    for ref in made[1 : 3 if which else 2]:
        body.one("negate", [ref], ref.shape)


@case("case")
def branch(body: Body, draw: Draw) -> None:
    rows, width, hidden = draw.dim(), draw.dim(), draw.dim()
    while rows * max(width, hidden) > 1 << 12:
        rows = 8
        width, hidden = min(width, 64), min(hidden, 64)
    x, w = body.arg((rows, hidden)), body.arg((hidden, width))
    y = body.arg((rows, width))
    which = body.arg((), "i32", "ints", 2)
    one, other = Region(body), Region(body)
    sides = [
        one.done([], [one.dot(x, w)]),
        other.done([], [other.op("tanh", [y], (rows, width))]),
    ]
    body.approximate = 1e-4
    body.one("case", [which], (rows, width), regions=f"({', '.join(sides)})")
