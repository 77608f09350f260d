"""`autoshard.estimate`: seconds, how sure, and where they are from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoshard
from autoshard import EstimateError, estimate
from autoshard.cost.machine.asked import _OPS
from autoshard.cost.machine.compute import roofline_seconds
from autoshard.cost.machine.device import DeviceError, builtin_kinds, load_device

PRODUCT = {"m": 8192, "k": 4096, "n": 4096}
PROMPT = {"batch": 1, "seq": 8192, "heads": 32, "head_dim": 128}


@pytest.mark.parametrize(
    ("device", "op", "sizes", "level"),
    [
        ("h100", "matmul", PRODUCT, "measured"),
        ("h100:8", "matmul", PRODUCT, "measured"),
        ("a100", "matmul", PRODUCT, "measured"),
        ("a100-40gb", "matmul", PRODUCT, "ratio"),
        ("h100-96gb", "attention", PROMPT, "ratio"),
        ("h100", "matmul", {**PRODUCT, "dtype": "f32"}, "ratio"),
        ("h100", "matmul", {**PRODUCT, "batch": 4}, "ratio"),
        ("l40s", "matmul", PRODUCT, "datasheet"),
        ("tpu-v5e", "matmul", PRODUCT, "compiler"),
        ("tpu-v5e", "matmul", {**PRODUCT, "dtype": "i8"}, "datasheet"),
        ("h200", "attention", {**PROMPT, "kv_heads": 8}, "measured"),
        ("h200", "attention", {**PROMPT, "causal": False}, "ratio"),
        ("h200", "attention", {**PROMPT, "backward": True}, "ratio"),
        ("h200", "attention", {**PROMPT, "head_dim": 64, "window": 128}, "measured"),
        ("a100", "attention", {**PROMPT, "window": 128}, "ratio"),
        ("cpu", "attention", PROMPT, "datasheet"),
        ("h100:8", "all-reduce", {"bytes": 2**26}, "measured"),
        ("h100", "all-gather", {"bytes": 2**26, "devices": 4}, "measured"),
        ("h100", "all-gather", {"bytes": 2**26, "devices": 3}, "ratio"),
        ("h100:2x8", "all-gather", {"bytes": 2**26}, "datasheet"),
        ("h100:2x8", "all-to-all", {"bytes": 2**26, "devices": 8}, "measured"),
        ("h100:8", "collective-permute", {"bytes": 2**26}, "datasheet"),
        ("tpu-v5e:4x4", "reduce-scatter", {"bytes": 2**26, "devices": 4}, "datasheet"),
    ],
)
def test_every_answer_says_what_it_rests_on(device: str, op: str, sizes: dict[str, Any], level: str) -> None:
    found = estimate(device, op, **sizes)
    assert (found.level, found.low < found.seconds < found.high) == (level, True)
    words = {
        "measured": "fitted to",
        "compiler": "estimates of libtpu",
        "ratio": "by datasheet ratios",
        "datasheet": "datasheet",
    }
    assert words[level] in str(found)


def test_a_roofline_is_the_roofline() -> None:
    device, moved = load_device("l40s"), 2 * (8192 * 4096 * 2 + 4096 * 4096)
    expected = roofline_seconds(2.0 * 8192 * 4096 * 4096, moved, "bf16", device)
    assert estimate("l40s", "matmul", **PRODUCT).seconds == expected


@pytest.mark.parametrize(
    ("device", "op", "sizes", "says"),
    [
        (
            "h100",
            "matmull",
            PRODUCT,
            r"no op is called 'matmull' \(did you mean matmul\?\); known are matmul, attention, all-",
        ),
        ("h100", "matmul", {"m": 3}, "matmul needs m, k, n; not given: k, n"),
        ("h100", "matmul", {**PRODUCT, "m": -1}, "m must be a whole number greater than 0, not -1"),
        ("h100", "matmul", {**PRODUCT, "m": 1.5}, "m must be a whole number greater than 0, not 1.5"),
        ("h100", "matmul", {**PRODUCT, "m": True}, "m must be a whole number, not True"),
        ("h100", "matmul", {**PRODUCT, "seq": 1}, "matmul has no 'seq'; it has m, k, n, batch"),
        ("h100", "matmul", {**PRODUCT, "dtype": "float"}, "no dtype is called 'float': write bf16"),
        ("h100", "attention", {**PROMPT, "kv_heads": 5}, "32 heads cannot share 5 kv_heads"),
        ("h100", "attention", {**PROMPT, "causal": 1}, "causal must be true or false, not 1"),
        ("h100", "all-reduce", {"bytes": 8}, "say between how many devices, or a topology such as h100:8"),
        ("h100:8", "all-reduce", {"bytes": 8, "devices": 3}, "groups of 3 do not make up the 8 devices of h100:1x8"),
        ("h100:8", "all-reduce", {"devices": 8}, "all-reduce needs bytes; not given: bytes"),
    ],
)
def test_bad_questions_are_refused_in_one_line(device: str, op: str, sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(EstimateError, match=says) as refused:
        estimate(device, op, **sizes)
    assert "\n" not in str(refused.value)


def test_an_unknown_device_is_named_with_near_ones() -> None:
    with pytest.raises(DeviceError, match=r"no device kind is called 'h10' \(did you mean h100\?\)"):
        autoshard.estimate("h10", "matmul", **PRODUCT)


@given(st.sampled_from(sorted(builtin_kinds())), st.sampled_from(sorted(_OPS)), st.data())
def test_any_sizes_have_an_answer_or_one_line(kind: str, op: str, data: st.DataObject) -> None:
    wanted = {name: st.integers(1, 2**16) for name, default in _OPS[op][1].items() if not isinstance(default, bool)}
    sizes = data.draw(st.fixed_dictionaries({}, optional=wanted))
    try:
        found = estimate(kind, op, **sizes)
    except (EstimateError, DeviceError) as error:
        refused = str(error)
    else:
        refused = ""
        assert 0 <= found.low <= found.seconds <= found.high < float("inf")
    assert "\n" not in refused


def test_the_command_line_asks_the_same(run: Any) -> None:
    status, out, _ = run("estimate", "h100:8", "all-reduce", "--bytes", "64MiB", "--json")
    said = json.loads(out.splitlines()[-1])
    assert (status, said["seconds"]) == (0, estimate("h100:8", "all-reduce", bytes=2**26).seconds)
    status, _, err = run("estimate", "h100", "matmul", "--m", "8")
    assert (status, err) == (2, "autoshard: matmul needs m, k, n; not given: k, n\n")
