import pytest

from autoshard.cost.device import load_device
from autoshard.verify import targets
from autoshard.verify.targets import Target, TargetError, gpu_limits, parse_target
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
        ("tpu-v5e", 8, "a TPU needs its topology"),
        ("tpu-v5e:8", 8, "a TPU needs its topology"),
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


def test_gpu_descriptions_hold_the_device_limits():
    for kind, limits in gpu_limits().items():
        text = gpu_target_config(kind)
        assert f"core_count: {limits['multiprocessors']}" in text
        assert f"device_memory_size: {limits['memory']}" in text
        assert limits["description"] in text
        assert text.count("{") == text.count("}")
