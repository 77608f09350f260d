"""Device kinds: what the built-in file says, what a user's file may say, and where axes lie by default."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from autoshard.cost.machine.device import (
    DeviceError,
    builtin_kinds,
    default_placement,
    load_device,
    scheduler_options,
    slop_of,
    with_slop,
)
from autoshard.mesh import Mesh
from autoshard.verify.targets import gpu_limits

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


@pytest.mark.parametrize("name", sorted(builtin_kinds()))
def test_built_in_kinds_are_complete_and_say_where_their_figures_come_from(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.source
    assert all(link.source for link in device.links)
    assert device.flops["bf16"] >= device.peak_flops("f64")
    assert device.memory_bytes is not None
    assert [link.bandwidth for link in device.links] == sorted((li.bandwidth for li in device.links), reverse=True)
    assert device.target == ("tpu" if name.startswith("tpu-") else "cpu" if name == "cpu" else "gpu")
    assert (device.clock > 0) == (device.target == "tpu")


def test_the_memory_limit_is_what_runtimes_leave() -> None:
    for kind in builtin_kinds():
        device = load_device(kind)
        if device.target == "gpu":  # what jax preallocates
            assert device.memory_limit == pytest.approx(0.75 * gpu_limits()[kind]["memory"], abs=1e6)
    assert load_device("cpu").memory_limit == load_device("cpu").memory_bytes


def test_a_kind_of_ones_own_may_say_what_is_left_of_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert load_device(path).memory_limit == 10**9
    path.write_text(MINE.replace("memory_bytes = 1e9\n", "memory_bytes = 1e9\nusable_bytes = 9e8\n"))
    assert load_device(path).memory_limit == 9 * 10**8


def test_a_v4_device_is_half_a_chip() -> None:
    assert load_device("tpu-v4").peak_flops("bf16") == 275e12 / 2


def test_unlisted_dtypes_run_as_f32_and_eight_bit_floats_as_i8() -> None:
    h100 = load_device("h100")
    assert h100.peak_flops("i64") == h100.flops["f32"]
    assert h100.peak_flops("f8E4M3FN") == h100.flops["i8"]


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"'tpu-v9' \(did you mean tpu-v4\?\); known are a100-40gb, .*tpu-v6e"):
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
        ("[mine]", '[mine]\nmeasured = "h100"', r"mine\.multiprocessors is missing"),
        ("[mine]", '[mine]\nmultiprocessors = 8\nmeasured = "h1"', r"mine\.measured must be one of a100, .*, not 'h1'"),
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
    assert resources.files("autoshard.cost.machine").joinpath("devices.toml").is_file()


def test_which_torus_dims_wrap_around() -> None:
    def wraps(kind: str, *shape: int) -> tuple[bool, ...]:
        return load_device(kind).links[0].wraps(shape)

    assert wraps("tpu-v5e", 8, 16) == (False, True), "a v5e dim of 16 is a ring, whatever the others are"
    assert wraps("tpu-v6e", 16, 16) == (True, True)
    assert wraps("tpu-v5p", 4, 4, 8) == (True, True, True)
    assert wraps("tpu-v5p", 2, 4, 4) == (False, False, False), "only whole cubes of 4x4x4 have optical links"
    assert wraps("tpu-v4", 4, 4, 4, 2) == (True, True, True, False), "the two devices of a chip are no torus dim"
    assert wraps("tpu-v4", 2, 2, 4, 2) == (False,) * 4


@pytest.mark.parametrize(
    ("text", "name", "devices", "islands"),
    [
        ("tpu-v5e:2x4", "tpu-v5e:2x4", 8, [8, 0]),
        ("tpu-v5e:4x4:2slices", "tpu-v5e:4x4:2slices", 32, [16, 0]),
        ("tpu-v5p:2x2", "tpu-v5p:2x2x1", 4, [4, 0]),
        ("tpu-v4:2x2x1", "tpu-v4:2x2x1", 8, [8, 0]),
        ("tpu-v6e:16x16", "tpu-v6e:16x16", 256, [256, 0]),
        ("h100:8", "h100:1x8", 8, [8, 0]),
        ("a100:2x4", "a100-80gb:2x4", 8, [4, 0]),
        ("b200:4x8", "b200:4x8", 32, [8, 0]),
    ],
)
def test_a_kind_with_its_topology(text: str, name: str, devices: int, islands: list[int]) -> None:
    device = load_device(text)
    assert (device.name, device.devices, [link.island for link in device.links]) == (name, devices, islands)
    assert device.kind == name.partition(":")[0]
    assert device.flops == load_device(text.partition(":")[0]).flops
    assert load_device(name) == device


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpu-v5e:8", "'tpu-v5e:8': tpu-v5e needs its topology, chips per torus dim such as 2x4"),
        ("tpu-v5e:", "tpu-v5e needs its topology"),
        ("tpu-v5e:2x2x2", "tpu-v5e is a torus of 2 dims"),
        ("tpu-v5e:32x16", "a slice of tpu-v5e has at most 256 chips, not 512"),
        ("tpu-v4:32x16x16", "a slice of tpu-v4 has at most 4096 chips"),
        ("tpu-v5p:2x2x2:two", "number of slices such as 2slices"),
        ("tpu-v5p:2x2x2:0slices", "number of slices"),
        ("h100:16", "nvlink joins at most 8 of h100, not 16: such as 2x8"),
        ("h100:2x16", "such as 4x8"),
        ("h100:2x8:2slices", "hosts x GPUs per host"),
        ("cpu:8", "a device of kind cpu has no topology: write cpu, not cpu:8"),
        ("tpu-v9:2x4", "no device kind is called 'tpu-v9'"),
        ("tpu-v5e+slop30:2x4", "tpu-v5e+slop30: only XLA's GPU compiler has a scheduler with such a limit"),
        ("h100+slop101:8", "h100+slop101: a percentage of memory is at most 100"),
        ("h100+slop:8", "no device kind is called 'h100+slop'"),
    ],
)
def test_a_topology_that_cannot_be_says_why(text: str, says: str) -> None:
    with pytest.raises(DeviceError) as error:
        load_device(text)
    assert says in str(error.value)


def test_a_gpu_kind_with_less_memory_for_the_latency_hiding_scheduler() -> None:
    usual, device = load_device("h100:8"), load_device("h100+slop30:8")
    assert (device.name, device.kind, device.slop, usual.slop) == ("h100+slop30:1x8", "h100", 30, 95)
    mesh = Mesh((2, 4), device="h100:8")
    other = with_slop(mesh, 30)
    assert other.device == "h100+slop30:8"
    assert with_slop(other, 10).device == "h100+slop10:8"
    assert (slop_of(mesh.device), slop_of(other.device)) == (None, 30)
    assert scheduler_options(mesh.device) == {}
    assert scheduler_options(other.device) == {"xla_gpu_memory_limit_slop_factor": 30}
    off = scheduler_options(with_slop(mesh, 0).device)
    assert off["xla_gpu_enable_latency_hiding_scheduler"] is False


def test_a_file_with_a_topology(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    near = MINE[MINE.index("[[mine") :].replace('"wire"', '"near"').replace("island = 0", "island = 4")
    path.write_text(MINE.replace("[[mine", near + "[[mine"))
    device = load_device(f"{path}:3x2")
    assert (device.name, device.devices, device.links[0].island) == ("mine:3x2", 6, 2)
    assert load_device(f"{path}#mine:3x2") == device
    path.write_text(MINE)
    with pytest.raises(DeviceError, match="a device of kind mine has no topology"):
        load_device(f"{path}:2x4")
