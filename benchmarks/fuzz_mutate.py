"""Random damage to good input: bytes, JSON and TOML documents, MLIR text. The same generator gives the same damage."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

RAW = "@raw:"
"""A string that begins so stands for the rest of it, written as it is: numbers that no JSON or TOML value holds."""

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 0.5, 1e-320, 1e308, -1e308, 2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**25, 10**400, -(10**400), RAW + "1e400", RAW + "-1e400", RAW + "nan", RAW + "-inf", RAW + "9" * 5000,
)  # fmt: skip
TEXTS = (
    "", "x", "é", "漢字", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\r\n", "\x00", "\ud800", "\u202e", "\u2028",
    "%s{}", "<script>alert(1)</script>", "../../x", "a" * 5000, "data", "op0", "NaN", "1", "[data],[]",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": 0},
    [0, 0],
    ["data", "data"],
    [["data"], ["model"]],
)
DEPTHS = (10, 100, 400, 900, 1100, 5000, 100_000)

EXTENTS = ("0", "1", "3", "5", "7", "64", "1000", "65536", "2147483648", "4611686018427387904", "9223372036854775807")
INTEGERS = (*EXTENTS, "-1", "-9223372036854775808", "9223372036854775808", "9" * 40)
DTYPES = ("f32", "bf16", "f16", "f64", "i1", "i8", "i32", "i64", "ui8", "ui32", "f8E4M3FN", "complex<f32>", "index")
DTYPES += ("!stablehlo.token", "tuple<f32>", "!quant.uniform<i8:f32, 0.1>", "i4", "f999")
ESCAPES = (
    rb"\1B[31mred",
    rb"\FF\FE",
    "é".encode(),
    b"\xff\xfe",
    rb"\00",
    rb"\0A",
    b"\x1b[2J",
    rb"\E2\80\AE",
    b"a" * 5000,
)


def document(value: Any, rng: random.Random) -> Any:
    """A JSON or TOML value with some of its parts changed, taken out, doubled, moved or buried."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 5))):
        places = list(_places(value))
        if not places:
            return rng.choice((*NUMBERS, *TEXTS, *OTHERS))
        holder, key = rng.choice(places)
        _DAMAGES[rng.randrange(len(_DAMAGES))](holder, key, places, rng)
    return value


def _places(value: Any) -> Any:
    """(holder, key) of every part of a document."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, dict | list):
            for key in each if isinstance(each, dict) else range(len(each)):
                yield each, key
                stack.append(each[key])


def _replace(holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    holder[key] = rng.choice(rng.choice((NUMBERS, TEXTS, OTHERS)))


def _alike(holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    """Another value of the same type."""
    value = holder[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    holder[key] = rng.choice(NUMBERS if number else TEXTS if isinstance(value, str) else OTHERS)


def _remove(holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    del holder[key]


def _double(holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * rng.choice((1, 1, 50))
    else:
        holder[f"{key}_"] = copy.deepcopy(holder[key])


def _move(holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    other, place = rng.choice(places)
    holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])


def _rename(holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    else:
        rng.shuffle(holder)


def _bury(holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    depth = rng.choice(DEPTHS)
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    inner = json.dumps(holder[key]) if isinstance(holder[key], int | float | str) else "0"
    holder[key] = RAW + opened * depth + inner + closed * depth


_DAMAGES = (_replace, _replace, _alike, _alike, _alike, _remove, _double, _move, _rename, _bury)


def to_json(value: Any) -> bytes:
    """JSON, with what is raw written as it is."""
    names = {"nan": "NaN", "-inf": "-Infinity"}
    text = json.dumps(value, ensure_ascii=False)
    text = re.sub(f'"{RAW}((?:[^"\\\\]|\\\\.)*)"', lambda raw: names.get(raw[1], json.loads(f'"{raw[1]}"')), text)
    return text.encode("utf-8", "surrogatepass")


def to_toml(value: Any) -> bytes:
    """TOML: one line per table, with what is in it inline."""
    lines = (
        [f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()]
        if isinstance(value, dict)
        else [_toml(value)]
    )
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str) and value.startswith(RAW):
        return value.removeprefix(RAW).replace('{"a":', "{a=")
    return '""' if value is None else json.dumps(value, ensure_ascii=False)


def data(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut off, taken out, doubled, put in."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice((1, 2, 8, 40)))
        how = rng.randrange(6)
        if how == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(found):
            found[at] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif how == 2:
            del found[at:end]
        elif how == 3:
            found[at:at] = found[at:end] * rng.choice((1, 1, 100))
        elif how == 4:
            found[at:at] = rng.choice(
                (b"\xff", b"\0" * 8, b"\x1b[31m", b"{" * 300, b"[" * 2000, b'"', b"\\", b"9" * 400)
            )
        elif rng.random() < 0.2:
            del found[at:]
    return bytes(found)


def mlir(text: bytes, rng: random.Random) -> bytes:
    """MLIR text with numbers, types, names, ops, lines or nesting changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(_MLIR)(text, rng)
    return text


def _substituted(pattern: bytes, text: bytes, new: Any, rng: random.Random) -> bytes:
    """One match of a pattern replaced by `new(match)`; or, now and then, all that are equal to it."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return text
    match = rng.choice(matches)
    by = new(match)
    if rng.random() < 0.4:
        return text.replace(match[0], by)
    return text[: match.start()] + by + text[match.end() :]


def _integer(text: bytes, rng: random.Random) -> bytes:
    return _substituted(rb"(?<![\w%.])-?\d+(?![\w.])", text, lambda _: rng.choice(INTEGERS).encode(), rng)


def _extent(text: bytes, rng: random.Random) -> bytes:
    return _substituted(rb"(?<=[<x])\d+(?=x)", text, lambda _: rng.choice(("?", *EXTENTS)).encode(), rng)


def _swapped(text: bytes, rng: random.Random) -> bytes:
    return _substituted(rb"(\d+)x(\d+)", text, lambda m: m[2] + b"x" + m[1], rng)


def _dtype(text: bytes, rng: random.Random) -> bytes:
    return _substituted(rb"(?<=[<x])[a-z]+\d+(?=>)", text, lambda _: rng.choice(DTYPES).encode(), rng)


def _operation(text: bytes, rng: random.Random) -> bytes:
    from benchmarks.ops_table import registered

    return _substituted(rb"\b(?:stablehlo|chlo|func)\.\w+", text, lambda _: rng.choice(registered()).encode(), rng)


def _callee(text: bytes, rng: random.Random) -> bytes:
    names = re.findall(rb"@[\w.]+", text) or [b"@main"]
    return _substituted(rb"@[\w.]+", text, lambda _: rng.choice(names), rng)


def _line(text: bytes, rng: random.Random) -> bytes:
    lines = text.split(b"\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(4)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines[at:at] = [lines[other]] * rng.choice((1, 20))
    elif how == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[min(at, other) : max(at, other)] = []
    return b"\n".join(lines)


def _escape(text: bytes, rng: random.Random) -> bytes:
    how, evil = rng.randrange(3), rng.choice(ESCAPES)
    if how == 0:
        return _substituted(rb'"[^"\n]*"', text, lambda m: b'"' + evil + m[0][1:], rng)
    if how == 1:
        return _substituted(rb"\n", text, lambda _: b' loc("' + evil + b'")\n', rng)
    return _substituted(rb"%[a-z]\w*: tensor<[^>]*>", text, lambda m: m[0] + b' loc("' + evil + b'")', rng)


def _nested(text: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((3, 50, 300, 1000, 20_000))
    how = rng.randrange(5)
    if how == 0:
        return b"module {\n" * depth + text + b"\n}" * depth
    if how == 1:
        return _substituted(rb"tensor<[^>]*>", text, lambda m: b"tuple<" * depth + m[0] + b">" * depth, rng)
    if how == 2:
        return _substituted(rb"\{", text, lambda _: b"{deep = " + b"[" * depth + b"]" * depth + b", ", rng)
    if how == 3:
        opened = b'"stablehlo.optimization_barrier"() ({\n' * depth
        return _substituted(rb"\n", text, lambda _: opened + b"}) : () -> ()\n" * depth, rng)
    depth = min(depth, 2000)
    call = b" func.call @f%d() : () -> ()\n"
    called = b"".join(b"func.func private @f%d() {\n" % i + call % (i + 1) * 2 + b" return\n}\n" for i in range(depth))
    called += b"func.func private @f%d() { return }\n" % depth
    text = _substituted(
        rb"(func\.func (?:public )?@main[^\n]*\{\n)", text, lambda m: m[1] + b"func.call @f0() : () -> ()\n", rng
    )
    return text.rstrip().removesuffix(b"}") + called + b"}" if text.lstrip().startswith(b"module") else text + called


_MLIR = (
    _integer,
    _integer,
    _extent,
    _extent,
    _swapped,
    _dtype,
    _operation,
    _callee,
    _line,
    _line,
    _escape,
    _nested,
    data,
)
