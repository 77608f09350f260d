"""Device kinds: what the built-in file says, what a user's file may say, and where axes lie by default."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path

import pytest

from autoshard.cost.device import Device, DeviceError, default_placement, load_device, target_of
from autoshard.mesh import Mesh

KINDS = ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "cpu"]

MINE = """
[mine]
target = "gpu"
flops = { f32 = 1e12, bf16 = 2e12 }
memory_bandwidth = 1e11
memory_bytes = 1e9
kernel_overhead = 1e-6
collective_overhead = 1e-6
achievable = { compute = 0.5, memory = 1 }
source = "invented"

[[mine.links]]
name = "wire"
topology = "switch"
bandwidth = 1e10
latency = 1e-6
island = 0
source = "invented"
"""


@pytest.mark.parametrize("name", KINDS)
def test_built_in_kinds_are_complete_and_say_where_their_figures_come_from(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.source
    assert all(link.source for link in device.links)
    assert device.flops["bf16"] >= device.peak_flops("f64")
    assert device.memory_bytes is not None
    assert [link.bandwidth for link in device.links] == sorted((li.bandwidth for li in device.links), reverse=True)
    assert target_of(device) == {"t": "tpu", "c": "cpu"}.get(name[0], "gpu")


def test_a_v4_device_is_half_a_chip() -> None:
    assert load_device("tpu-v4").peak_flops("bf16") == 275e12 / 2


def test_unlisted_dtypes_run_as_f32_and_eight_bit_floats_as_i8() -> None:
    h100 = load_device("h100")
    assert h100.peak_flops("i64") == h100.flops["f32"]
    assert h100.peak_flops("f8E4M3FN") == h100.flops["i8"]


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"no device kind is called 'tpu-v9'; known are a100-40gb, .*tpu-v6e"):
        load_device("tpu-v9")


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    device = load_device(path)
    assert (device.name, device.achievable_compute, device.links[0].name) == ("mine", 0.5, "wire")
    assert load_device(f"{path}#mine") == device
    with pytest.raises(DeviceError, match="no device kind"):
        load_device("mine")
    monkeypatch.setenv("AUTOSHARD_DEVICES", str(path))
    assert load_device("mine") == device
    assert load_device("h100").name == "h100"


def test_a_file_of_several_kinds_wants_a_name(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(MINE + MINE.replace("mine", "other"))
    assert load_device(f"{path}#other").name == "other"
    with pytest.raises(DeviceError, match=r"two\.toml describes mine, other: say which, as in .*two\.toml#mine"):
        load_device(path)


def test_no_memory_means_no_limit(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace("memory_bytes = 1e9\n", ""))
    assert load_device(path).memory_bytes is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth = 1e10", "bandwidth = -1", r"mine\.links\[0\]\.bandwidth must be a number greater than 0, not -1"),
        ("bandwidth = 1e10\n", "", r"mine\.links\[0\]\.bandwidth is missing"),
        ('"switch"', '"star"', r"mine\.links\[0\]\.topology must be one of torus, switch, shared, not 'star'"),
        ('"switch"', '"torus"', r"mine\.links\[0\]\.dims is missing"),
        ('target = "gpu"', "target = 3", r"mine\.target must be a non-empty string, not 3"),
        ("f32 = 1e12, ", "", r"mine\.flops\.f32 is missing"),
        ("f32 = 1e12", 'f32 = "fast"', r"mine\.flops\.f32 must be a number greater than 0, not 'fast'"),
        ("compute = 0.5", "compute = 1.5", r"mine\.achievable\.compute must be a number .* at most 1, not 1\.5"),
        ("kernel_overhead", "kernel_overhed", r"mine\.kernel_overhed is not a field; the fields are target, flops"),
        ("island = 0", "island = 8", r"mine\.links\[0\]\.island must be 0 .* for the last link"),
        ("island = 0", "island = 1.5", r"mine\.links\[0\]\.island must be a whole number"),
        ("memory_bytes = 1e9", "memory_bytes = nan", r"mine\.memory_bytes must be a number greater than 0"),
        ('name = "wire"', 'name = "a+b"', r"mine\.links\[0\]\.name must not contain '\+'"),
        ("[mine]", "[mine", "is not TOML"),
    ],
)
def test_a_malformed_file_names_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINE
    path = tmp_path / "bad.toml"
    path.write_text(MINE.replace(old, new, 1))
    with pytest.raises(DeviceError, match=rf"bad\.toml.*{message}"):
        load_device(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot read the device file .*gone\.toml: No such file"):
        load_device(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("shape", "kind", "placement"),
    [
        ((2, 4), "tpu-v5e", ("ici", "ici")),
        ((2, 256), "tpu-v5e", ("dcn", "ici")),
        ((512,), "tpu-v5e", ("ici+dcn",)),
        ((2, 4), "h100", ("nvlink", "nvlink")),
        ((2, 8), "h100", ("ib", "nvlink")),
        ((4, 16), "h100", ("ib", "nvlink+ib")),
        ((8, 2), "cpu", ("memory", "memory")),
    ],
)
def test_inner_axes_lie_on_the_fast_link(shape: tuple[int, ...], kind: str, placement: tuple[str, ...]) -> None:
    assert default_placement(Mesh(shape, device=kind)) == placement


def test_a_given_placement_is_kept_and_checked() -> None:
    assert default_placement(Mesh((2, 4), device="h100", placement=("ib", "nvlink"))) == ("ib", "nvlink")
    with pytest.raises(DeviceError, match="device h100 has no link 'ici'; it has nvlink, ib"):
        default_placement(Mesh((2, 4), device="h100", placement=("ici", "nvlink")))


def test_the_file_is_installed_with_the_package() -> None:
    assert resources.files("autoshard.cost").joinpath("devices.toml").is_file()


def test_only_full_torus_dims_wrap_around() -> None:
    def wraps(device: Device, size: int) -> bool:
        return device.links[0].wraps(size)

    assert [size for size in (2, 4, 8, 16) if wraps(load_device("tpu-v5e"), size)] == [16]
    assert [size for size in (2, 4, 6, 8, 12) if wraps(load_device("tpu-v5p"), size)] == [4, 8, 12]
    assert not wraps(load_device("h100"), 8)
    assert not math.isinf(load_device("tpu-v5e").links[0].island)
