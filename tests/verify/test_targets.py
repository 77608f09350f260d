import pytest

from autoshard.cost.machine.device import builtin_kinds, load_device
from autoshard.mesh import Mesh
from autoshard.verify import targets
from autoshard.verify.targets import Target, TargetError, default_target, gpu_limits, on_target, parse_target
from autoshard.verify.worker import gpu_target_config


@pytest.mark.parametrize(
    ("text", "family", "device", "devices", "topology", "slices"),
    [
        ("cpu", "cpu", "cpu", 8, (), 1),
        ("cpu:8", "cpu", "cpu", 8, (), 1),
        ("tpu-v5e:2x4", "tpu", "tpu-v5e", 8, (2, 4), 1),
        ("tpu-v5e:4x4:2slices", "tpu", "tpu-v5e", 32, (4, 4), 2),
        ("TPU-v5p:2x2x2", "tpu", "tpu-v5p", 8, (2, 2, 2), 1),
        ("tpu-v5p:2x2", "tpu", "tpu-v5p", 4, (2, 2, 1), 1),
        ("tpu-v6e:2x4", "tpu", "tpu-v6e", 8, (2, 4), 1),
        ("tpu-v4:2x2x1", "tpu", "tpu-v4", 8, (2, 2, 1), 1),
        ("tpu-v4:2x2", "tpu", "tpu-v4", 8, (2, 2, 1), 1),
        ("h100:8", "gpu", "h100", 8, (1, 8), 1),
        ("h100:2x8", "gpu", "h100", 16, (2, 8), 1),
        ("a100:4", "gpu", "a100-80gb", 4, (1, 4), 1),
        ("a100-40gb:8", "gpu", "a100-40gb", 8, (1, 8), 1),
        ("h200:8", "gpu", "h200", 8, (1, 8), 1),
        ("h100+slop30:2x8", "gpu", "h100", 16, (2, 8), 1),
    ],
)
def test_the_forms_of_a_target(text, family, device, devices, topology, slices):
    target = parse_target(text, mesh_size=devices)
    assert (target.family, target.device, target.num_devices) == (family, device, devices)
    assert (target.topology, target.slices) == (topology, slices)
    assert parse_target(str(target), mesh_size=devices) == target
    assert load_device(target.device).target == family, "the judge needs a device model of every target"


@pytest.mark.parametrize(
    ("text", "mesh_size", "says"),
    [
        ("tpu-v9:2x4", 8, "TPU kinds are tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e"),
        ("rocm:8", 8, "unknown target 'rocm:8': known are cpu, tpu-v4"),
        ("tpu-v5e", 8, "tpu-v5e needs its topology"),
        ("tpu-v5e:8", 8, "tpu-v5e needs its topology"),
        ("tpu-v5e:2x2x2", 8, "tpu-v5e is a torus of 2 dims"),
        ("tpu-v5e:2x4:slices", 8, "number of slices such as 2slices"),
        ("tpu-v5e:2x4:2slices:3", 8, "number of slices"),
        ("h100", 8, "needs its number of GPUs"),
        ("h100:0", 8, "needs its number of GPUs"),
        ("h100:2x2x2", 8, "hosts x GPUs per host"),
        ("cpu:2x4", 8, "a number of devices"),
        ("cpu", None, "write cpu:8"),
        ("tpu-v5e:4x4", 8, "has 16 devices, but the plan's mesh has 8"),
        ("tpu-v4:4x4x4", 64, "has 128 devices (XLA counts two per tpu-v4 chip), but the plan's mesh has 64"),
        ("cpu:4", 8, "has 4 devices"),
        ("tpu-v5e+slop30:2x4", 8, "unknown target 'tpu-v5e+slop30:2x4'"),
    ],
)
def test_what_is_wrong_with_a_target_is_said(text, mesh_size, says):
    with pytest.raises(TargetError) as error:
        parse_target(text, mesh_size)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("target", "missing", "says"),
    [
        ("tpu-v5e:2x4", "libtpu", "pip install 'autoshard[tpu]'"),
        ("h100:8", "jax-cuda12-plugin", "pip install 'autoshard[gpu]'"),
        ("h100:8", "jax-cuda12-pjrt", "pip install 'autoshard[gpu]'"),
    ],
)
def test_a_missing_compiler_names_the_extra(monkeypatch, target, missing, says):
    def version(name):
        if name == missing:
            raise targets.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(targets.metadata, "version", version)
    with pytest.raises(TargetError) as error:
        parse_target(target).packages()
    assert says in str(error.value)
    assert f"{missing} is not installed" in str(error.value)


def test_versions_of_what_compiles_are_known():
    assert set(Target("cpu", "cpu", "cpu", 8).packages()) == {"jax", "jaxlib"}


def test_every_gpu_kind_has_limits_that_agree_with_its_figures():
    devices = [load_device(kind) for kind in builtin_kinds()]
    assert {device.name for device in devices if device.target == "gpu"} == set(gpu_limits())
    for kind, limits in gpu_limits().items():
        device = load_device(kind)
        assert device.multiprocessors == limits["multiprocessors"]
        assert device.compute_capability == float("{}.{}".format(*limits["compute_capability"]))
        assert device.memory_bytes == pytest.approx(limits["memory"], rel=0.08)
        assert device.memory_bandwidth == pytest.approx(limits["bandwidth"], rel=0.05)


def test_gpu_descriptions_hold_the_device_limits():
    for kind, limits in gpu_limits().items():
        text = gpu_target_config(kind)
        assert f"core_count: {limits['multiprocessors']}" in text
        assert f"device_memory_size: {limits['memory']}" in text
        assert limits["description"] in text
        assert text.count("{") == text.count("}")


OURS = """
[ours]
target = "gpu"
flops = { f32 = 1e12 }
memory_bandwidth = 1e11
kernel_overhead = 1e-6
collective_overhead = 1e-6
achievable = { compute = 1, memory = 1 }
source = "invented"
links = [
  { name = "near", topology = "switch", bandwidth = 1e11, latency = 1e-6, island = 8, source = "invented" },
  { name = "far", topology = "switch", bandwidth = 1e10, latency = 1e-6, island = 0, source = "invented" },
]
"""


@pytest.mark.parametrize(
    ("mesh", "target", "device", "placement"),
    [
        (Mesh((2, 4), device="h100"), "h100:8", "h100:8", ()),
        (Mesh((2, 4), device="h100"), "h100:2x4", "h100:2x4", ()),
        (Mesh((2, 4), device="h100", placement=("ib", "nvlink")), "h100:2x4", "h100:2x4", ("ib", "nvlink")),
        (Mesh((2, 4), device="h100", placement=("ib", "nvlink")), "tpu-v5e:2x4", "tpu-v5e:2x4", ()),
        (Mesh((2, 4), device="h100:2x4"), "h100:8", "h100:8", ()),
        (Mesh((2, 4), device="a100"), "a100:2x4", "a100:2x4", ()),
        (Mesh((2, 4), device="tpu-v5e"), "cpu", "cpu", ()),
    ],
)
def test_a_mesh_lies_on_the_target_as_it_was_placed(mesh, target, device, placement):
    found = on_target(mesh, parse_target(target, mesh.size))
    assert (found.device, found.placement) == (device, placement)
    assert (found.shape, found.axis_names) == (mesh.shape, mesh.axis_names)


def test_a_mesh_that_was_placed_across_hosts_does_not_lie_on_one():
    mesh = Mesh((2, 4), device="h100", placement=("ib", "nvlink"))
    with pytest.raises(TargetError, match=r"does not lie on h100:1x8 \(data of 2 on ib, model of 4 on nvlink\)"):
        on_target(mesh, parse_target("h100:8", 8))


def test_a_kind_of_ones_own_keeps_its_figures_on_a_target_of_its_family(tmp_path):
    (tmp_path / "ours.toml").write_text(OURS)
    mesh = Mesh((2, 4), device=f"{tmp_path / 'ours.toml'}")
    assert on_target(mesh, parse_target("h200:2x4", 8)).device == f"{tmp_path / 'ours.toml'}:2x4"
    assert on_target(mesh, parse_target("tpu-v5e:2x4", 8)).device == "tpu-v5e:2x4"
    with pytest.raises(TargetError, match="ours is a device kind of your own: what it compiles for is not known"):
        default_target(mesh)


@pytest.mark.parametrize(
    ("mesh", "target"),
    [
        (Mesh((2, 4), device="tpu-v5e"), "tpu-v5e:2x4"),
        (Mesh((4, 2), device="tpu-v5e"), "tpu-v5e:2x4"),
        (Mesh((16, 16), device="tpu-v5e"), "tpu-v5e:16x16"),
        (Mesh((2, 4), device="tpu-v5p"), "tpu-v5p:2x2x2"),
        (Mesh((2, 8), device="h100"), "h100:2x8"),
        (Mesh((2, 4), device="h100", placement=("ib", "nvlink")), "h100:2x4"),
        (Mesh((2, 8), device="tpu-v6e", placement=("dcn", "ici")), "tpu-v6e:2x4:2slices"),
        (Mesh((2, 4)), "cpu"),
    ],
)
def test_the_target_of_a_plan_without_one(mesh, target):
    assert default_target(mesh) == target
    assert parse_target(target, mesh.size).num_devices == mesh.size
