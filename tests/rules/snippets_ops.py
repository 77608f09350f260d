"""Cases of `graph/rules/table.py`: elementwise, products, reductions, normalisations, random, linear algebra."""

from __future__ import annotations

from collections.abc import Sequence

from tests.rules.snippets import IDENTITY, WITHOUT, Body, Draw, case, i64s, region

UNARY = {
    **dict.fromkeys(("abs", "cbrt", "ceil", "cosine", "exponential", "exponential_minus_one", "floor"), "normal"),
    **dict.fromkeys(("logistic", "negate", "sign", "sine", "tan", "tanh"), "normal"),
    **dict.fromkeys(("round_nearest_afz", "round_nearest_even"), "normal"),
    **dict.fromkeys(("log", "log_plus_one", "rsqrt", "sqrt"), "positive"),
    **dict.fromkeys(("chlo.acos", "chlo.asin", "chlo.atan", "chlo.atanh", "chlo.erf_inv"), "unit"),
    **dict.fromkeys(("chlo.asinh", "chlo.bessel_i1e", "chlo.conj", "chlo.cosh", "chlo.erf", "chlo.erfc"), "normal"),
    **dict.fromkeys(("chlo.sinh", "chlo.square"), "normal"),
    "chlo.acosh": "above one",
    "chlo.digamma": "positive",
    "chlo.lgamma": "positive",
}
TRANSCENDENTAL = 1e-4

WITHOUT.update(
    attention="lowering makes a region of it: tests/attention",
    attention_grad="lowering makes a region of it: tests/attention",
    experts="lowering makes a region of it: tests/experts",
    experts_grad="lowering makes a region of it: tests/experts",
    copy="the importer takes copies out of the graph",
    bitcast="made by XLA itself; the importer takes mhlo.bitcast out",
    argument="every case has arguments",
    partition_id="differs on every device by definition",
    replica_id="differs on every device by definition",
    create_token="has no tensor",
    map="StableHLO's elementwise ops take its place in every frontend; XLA inlines it before it partitions",
    uniform_quantize="XLA's CPU compiler has no quantized types",
    uniform_dequantize="XLA's CPU compiler has no quantized types",
    constant_like="a constant once shapes are known",
    tpu_custom_call="no compiler here has a Mosaic kernel of one device's shapes",
    MoveToHost="XLA's CPU compiler takes it out",
    MoveToDevice="XLA's CPU compiler takes it out",
    annotate_device_placement="XLA's CPU compiler takes it out",
)
WITHOUT.update(
    dict.fromkeys(
        ("Qr", "Eigh", "LuDecomposition", "ProductOfElementaryHouseholderReflectors", "ApproxTopK", "LayoutConstraint"),
        "whole by rule; expanded or gathered before it is partitioned",
    )
)


def bare(name: str) -> str:
    """An op's name without its dialect."""
    return name.rpartition(".")[2]


def expanded(draw: Draw) -> tuple[int, ...]:
    """A shape for an op that is expanded into others, constants among them.

    Equal constants are merged, and shardings spread through them from one case to another: so no other case has it.
    """
    return (*draw.shape(1, 3), draw.one(range(201, 999, 2)))


DIALECT = {bare(name): name for name in UNARY}


@case(*(bare(name) for name in UNARY))
def unary(body: Body, draw: Draw) -> None:
    name = DIALECT[draw.kind]
    dtype = "bf16" if draw.chance(0.1) and not name.startswith("chlo") else "f32"
    shape = expanded(draw) if name.startswith("chlo") else draw.shape()
    body.approximate = 2e-2 if dtype == "bf16" else TRANSCENDENTAL
    how = UNARY[name]
    body.one(name, [body.arg(shape, dtype, how)], shape, dtype)


@case("is_inf", "is_neg_inf", "is_pos_inf", "is_finite")
def finite(body: Body, draw: Draw) -> None:
    shape = draw.shape() if draw.kind == "is_finite" else expanded(draw)
    name = draw.kind if draw.kind == "is_finite" else f"chlo.{draw.kind}"
    body.one(name, [body.arg(shape)], shape, "i1")


@case(
    "add", "atan2", "divide", "maximum", "minimum", "multiply", "power", "remainder", "subtract", "next_after", "zeta"
)
def binary(body: Body, draw: Draw) -> None:
    name = f"chlo.{draw.kind}" if draw.kind in ("next_after", "zeta") else draw.kind
    shape = draw.shape() if name == draw.kind else expanded(draw)
    if draw.kind == "add" and draw.chance(0.4):
        sum_of_products(body, draw)
        return
    how = "positive" if draw.kind in ("power", "remainder", "divide") else "normal"
    left, right = body.arg(shape, how="above one" if draw.kind == "zeta" else how), body.arg(shape, how="positive")
    body.approximate = TRANSCENDENTAL
    body.one(name, [left, right], shape)


def sum_of_products(body: Body, draw: Draw) -> None:
    """A sum of two or three products, which TPU and GPU reduce once."""
    m, n = draw.dim(), draw.dim()
    terms = []
    for _ in range(draw.one((2, 2, 3))):
        k = draw.dim(uneven=0)
        numbers = (
            "dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>"
        )
        terms.append(body.one("dot_general", [body.arg((m, k)), body.arg((k, n))], (m, n), attrs=numbers, keep=False))
    total = terms[0]
    for term in terms[1:]:
        total = body.one("add", [total, term], (m, n), keep=term is terms[-1])
    if draw.chance(0.5):
        body.read(total, draw)


@case("polygamma")
def polygamma(body: Body, draw: Draw) -> None:
    shape = expanded(draw)
    order = body.const("1.0", shape)
    body.approximate = TRANSCENDENTAL
    body.one("chlo.polygamma", [order, body.arg(shape, how="positive")], shape)


@case("and", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "not", "popcnt")
def bits(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    count = 1 if draw.kind in ("not", "popcnt") else 2
    below = 8 if "shift" in draw.kind else 1000
    made = body.one(draw.kind, [body.arg(shape, "i32", "ints", below) for _ in range(count)], shape, "i32", keep=False)
    body.one("convert", [made], shape)


@case("count_leading_zeros")
def leading(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    body.one("count_leading_zeros", [body.arg(shape, "i32", "ints")], shape, "i32")


@case("compare", "select")
def compare(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    left, right = body.arg(shape), body.arg(shape)
    direction = draw.rng.choice(("EQ", "LT", "GE"))
    attrs = f"comparison_direction = #stablehlo<comparison_direction {direction}>"
    if draw.kind == "compare":
        body.one("compare", [left, right], shape, "i1", attrs)
        return
    if draw.chance(0.3):
        chosen = body.arg((), "i1", "bools")
    elif draw.chance(0.5):
        chosen = body.arg(shape, "i1", "bools")
    else:
        chosen = body.one("compare", [left, right], shape, "i1", attrs, keep=False)
    body.one("select", [chosen, left, body.arg(shape)], shape)


@case("clamp")
def clamp(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    edges = [body.const("-0.5"), body.const("0.5")] if draw.chance(0.5) else [body.arg(shape, how=h) for h in UNIT]
    body.one("clamp", [edges[0], body.arg(shape), edges[1]], shape)


UNIT = ("negative", "positive")


@case("convert")
def convert(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    source, target = draw.rng.choice((("f32", "bf16"), ("bf16", "f32"), ("f32", "i32"), ("i32", "f32"), ("i1", "f32")))
    how = "ints" if source == "i32" else "bools" if source == "i1" else "normal"
    body.approximate = 2e-2 if "bf16" in (source, target) else 1e-5
    body.one("convert", [body.arg(shape, source, how)], shape, target)


@case("bitcast_convert")
def bitcast_convert(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    made = body.one("bitcast_convert", [body.arg(shape)], shape, "i32", keep=False)
    body.one("bitcast_convert", [made], shape)


@case("reduce_precision")
def reduce_precision(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    body.one("reduce_precision", [body.arg(shape)], shape, attrs="exponent_bits = 8 : i32, mantissa_bits = 7 : i32")


@case("complex", "real", "imag")
def complex_(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    made = body.one("complex", [body.arg(shape), body.arg(shape)], shape, "complex<f32>", keep=draw.kind == "complex")
    if draw.kind != "complex":
        body.one(draw.kind, [made], shape)


@case("optimization_barrier")
def optimization_barrier(body: Body, draw: Draw) -> None:
    shapes = [draw.shape() for _ in range(draw.one((1, 2)))]
    made = body.op("optimization_barrier", [body.arg(s) for s in shapes], [(s, "f32") for s in shapes], keep=False)
    for ref in made:
        body.one("negate", [ref], ref.shape)


@case("constant", "iota", "rng")
def source(body: Body, draw: Draw) -> None:
    """What is free in every sharding, read beside an argument."""
    shape = draw.shape()
    if draw.kind == "constant":
        free = body.const("2.0", shape)
    elif draw.kind == "iota":
        free = body.one("iota", [], shape, attrs=f"iota_dimension = {draw.one(range(len(shape)))} : i64", keep=False)
    else:
        edges = [
            body.const("0.0"),
            body.const("1.0"),
            body.const(f"[{', '.join(map(str, shape))}]", (len(shape),), "i64"),
        ]
        drawn = body.one(
            "rng", edges, shape, attrs="rng_distribution = #stablehlo<rng_distribution UNIFORM>", keep=False
        )
        free = body.one("floor", [drawn], shape, keep=False)  # numbers in [0, 1): equal in every run
    body.one("add", [free, body.arg(shape)], shape)


@case("rng_bit_generator")
def rng_bit_generator(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    state = body.arg((2,), "ui64", "state")
    attrs = "rng_algorithm = #stablehlo<rng_algorithm THREE_FRY>"
    _, bits = body.op("rng_bit_generator", [state], [((2,), "ui64"), (shape, "ui32")], attrs, keep=False)
    if draw.chance(0.5):
        body.one("convert", [bits], shape)
    else:
        drawn = body.one("convert", [bits], shape, keep=False)
        body.one("multiply", [drawn, body.arg(shape)], shape)


# ---- products and sums ---------------------------------------------------------------------------------------------


@case("dot_general")
def dot_general(body: Body, draw: Draw) -> None:
    batch = [draw.dim(uneven=0.05, small=0.2) for _ in range(draw.one((0, 0, 1, 1, 2)))]
    contract = [draw.dim() for _ in range(draw.one((1, 1, 1, 2)))]
    left = [draw.dim() for _ in range(draw.one((0, 1, 1, 1, 2)))]
    right = [draw.dim() for _ in range(draw.one((0, 1, 1, 1, 2)))]
    while max(_size(batch, left, contract), _size(batch, right, contract), _size(batch, left, right)) > 1 << 18:
        largest = max((group for group in (batch, contract, left, right) if group), key=max)
        largest[largest.index(max(largest))] = 8
    sides = []
    for free in (left, right):
        names = [("b", i) for i in range(len(batch))] + [("k", i) for i in range(len(contract))]
        names += [("f", i) for i in range(len(free))]
        if draw.chance(0.6):
            draw.rng.shuffle(names)
        sizes = {"b": batch, "k": contract, "f": free}
        shape = [sizes[group][i] for group, i in names]
        dims = {g: [names.index((g, i)) for i in range(len(sizes[g]))] for g in ("b", "k")}
        # Free dims come in the order of the operand.
        sides.append((shape, dims, [size for (group, i) in names if group == "f" for size in [free[i]]]))
    (ls, ld, lf), (rs, rd, rf) = sides
    attrs = (
        f"dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = {ld['b']}, rhs_batching_dimensions = "
        f"{rd['b']}, lhs_contracting_dimensions = {ld['k']}, rhs_contracting_dimensions = {rd['k']}>"
    )
    dtype = "bf16" if draw.chance(0.1) else "f32"
    body.approximate = 3e-2 if dtype == "bf16" else 1e-5
    made = body.one("dot_general", [body.arg(ls, dtype), body.arg(rs, dtype)], [*batch, *lf, *rf], dtype, attrs)
    if draw.chance(0.5):
        body.read(made, draw)


def _size(*groups: Sequence[int]) -> int:
    total = 1
    for group in groups:
        for size in group:
            total *= size
    return total


@case("reduce")
def reduce(body: Body, draw: Draw) -> None:
    shape = draw.shape()
    dims = draw.dims(len(shape))
    kept = [size for dim, size in enumerate(shape) if dim not in dims]
    attrs = f"dimensions = {i64s(dims)}"
    which = draw.rng.choice(("add", "add", "maximum", "minimum", "multiply", "and", "or", "argmax"))
    if which == "argmax":
        argmax(body, draw, shape, dims[0])
        return
    if which in ("and", "or"):
        initial = body.const("true" if which == "and" else "false", (), "i1")
        body.one("reduce", [body.arg(shape, "i1", "bools"), initial], kept, "i1", attrs, region(which, ["i1"]))
        return
    how = "near one" if which == "multiply" else "normal"
    body.approximate = 1e-4
    initial = body.const(IDENTITY[which])
    made = body.one("reduce", [body.arg(shape, how=how), initial], kept, "f32", attrs, region(which, ["f32"]))
    if draw.chance(0.5):
        body.read(made, draw)


def argmax(body: Body, draw: Draw, shape: Sequence[int], dim: int) -> None:
    """The largest element of a dim and its place, as torch_xla and jax write it."""
    place = body.one("iota", [], shape, "i32", f"iota_dimension = {dim} : i64", keep=False)
    kept = [size for other, size in enumerate(shape) if other != dim]
    body.op(
        "reduce",
        [body.arg(shape), place, body.const(IDENTITY["maximum"]), body.const("0", (), "i32")],
        [(kept, "f32"), (kept, "i32")],
        f"dimensions = {i64s([dim])}",
        """({
^bb0(%a: tensor<f32>, %i: tensor<i32>, %b: tensor<f32>, %j: tensor<i32>):
%gt = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
%eq = stablehlo.compare EQ, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
%lt = stablehlo.compare LT, %i, %j : (tensor<i32>, tensor<i32>) -> tensor<i1>
%tie = stablehlo.and %eq, %lt : tensor<i1>
%first = stablehlo.or %gt, %tie : tensor<i1>
%v = stablehlo.select %gt, %a, %b : tensor<i1>, tensor<f32>
%p = stablehlo.select %first, %i, %j : tensor<i1>, tensor<i32>
stablehlo.return %v, %p : tensor<f32>, tensor<i32>
})""",
    )


# ---- normalisation -------------------------------------------------------------------------------------------------


@case("batch_norm_training", "batch_norm_inference", "batch_norm_grad")
def batch_norm(body: Body, draw: Draw) -> None:
    shape = draw.shape(2, 4)
    feature = draw.one(range(len(shape)))
    width = (shape[feature],)
    attrs = f"epsilon = 1.0e-5 : f32, feature_index = {feature} : i64"
    body.approximate = 1e-4
    vector = (width, "f32")
    operands = [body.arg(shape), body.arg(width), body.arg(width)]
    if draw.kind == "batch_norm_training":
        body.op(draw.kind, operands, [(shape, "f32"), vector, vector], attrs)
    elif draw.kind == "batch_norm_inference":
        body.one(draw.kind, [*operands, body.arg(width), body.arg(width, how="positive")], shape, attrs=attrs)
    else:
        operands = [body.arg(shape), body.arg(width), body.arg(width), body.arg(width, how="positive"), body.arg(shape)]
        body.op(draw.kind, operands, [(shape, "f32"), vector, vector], attrs)


# ---- linear algebra ------------------------------------------------------------------------------------------------


@case("cholesky", "triangular_solve")
def solvers(body: Body, draw: Draw) -> None:
    batch = [draw.dim(uneven=0.1) for _ in range(draw.one((0, 1, 1, 2)))]
    while len(batch) == 2 and batch[0] * batch[1] > 512:
        batch[batch.index(max(batch))] = 8
    size = draw.one((4, 8))
    body.approximate = 1e-3
    if draw.kind == "cholesky":
        body.one("cholesky", [body.arg((*batch, size, size), how="spd")], (*batch, size, size), attrs="lower = true")
        return
    left = draw.chance(0.5)
    other = draw.dim()
    b = (*batch, size, other) if left else (*batch, other, size)
    attrs = (
        f"left_side = {str(left).lower()}, lower = true, unit_diagonal = false, "
        "transpose_a = #stablehlo<transpose NO_TRANSPOSE>"
    )
    body.one("triangular_solve", [body.arg((*batch, size, size), how="triangle"), body.arg(b)], b, attrs=attrs)


@case("fft")
def fft(body: Body, draw: Draw) -> None:
    batch = [draw.dim() for _ in range(draw.one((1, 1, 2)))]
    while len(batch) == 2 and batch[0] * batch[1] > 2048:
        batch[batch.index(max(batch))] = 8
    count = draw.one((1, 1, 2))
    length = [16, 8][:count]
    half = [*length[:-1], length[-1] // 2 + 1]
    which = draw.rng.choice(("RFFT", "IRFFT", "FFT"))
    attrs = f"fft_type = #stablehlo<fft_type {which}>, fft_length = {i64s(length)}"
    body.approximate = 1e-4
    if which == "RFFT":
        made = body.one("fft", [body.arg([*batch, *length])], [*batch, *half], "complex<f32>", attrs, keep=False)
        body.one("real", [made], made.shape)
        return
    extents = half if which == "IRFFT" else length
    read = body.one("complex", [body.arg([*batch, *extents]), body.arg([*batch, *extents])],
                    [*batch, *extents], "complex<f32>", keep=False)  # fmt: skip
    if which == "IRFFT":
        body.one("fft", [read], [*batch, *length], "f32", attrs)
    else:
        made = body.one("fft", [read], [*batch, *length], "complex<f32>", attrs, keep=False)
        body.one("imag", [made], made.shape)
