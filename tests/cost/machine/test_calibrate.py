"""Calibration: known parameters come back from synthetic points, and a real CPU can be measured."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from autoshard.cli import commands as cli
from autoshard.cost.machine import calibrate as fitting
from autoshard.cost.machine import measure
from autoshard.cost.machine.calibrate import CalibrationError, calibrate, to_toml
from autoshard.cost.machine.collectives import seconds
from autoshard.cost.machine.device import Device, Link, load_device
from autoshard.cost.machine.measure import MEASURED_KINDS, Budget, points, timed
from autoshard.mesh import Mesh

FACTS = {"backend": "jax", "version": "0.10.2", "device": "NVIDIA H200", "platform": "gpu", "devices": 8}
QUICKEST = Budget(0.0, 0.0, 1)


def machine(bandwidth: float = 3e11, latency: float = 2e-6, topology: str = "switch", platform: str = "gpu") -> Device:
    """A machine whose figures are known."""
    near = Link("near", topology, bandwidth, latency, 0)  # type: ignore[arg-type]
    rates = {"f32": 4e14, "bf16": 7e14}
    return Device("known", platform, rates, 4e12, int(1.4e11), 4e-6, 2e-5, 1.0, 1.0, (near,))  # type: ignore[arg-type]


def synthetic(device: Device, devices: int = 8, noise: Callable[[], float] = lambda: 1.0) -> list[dict[str, Any]]:
    """What `measure` would write of the machine, times noise."""
    found: list[dict[str, Any]] = []

    def add(time: float, **facts: Any) -> None:
        found.append({**facts, "seconds": time * noise(), "spread": 0.01})

    for kernels in (2, 8, 32, 128):
        add(3e-5 + kernels * device.kernel_overhead, what="launch", kernels=kernels)
    for dtype, rate in device.flops.items():
        for size in (1024, 2048, 4096, 8192):
            add(3e-5 + 2 * size**3 / rate, what="matmul", dtype=dtype, size=size, flops=2.0 * size**3)
    for op, times in (("copy", 2), ("add", 3)):
        for size in (2**26, 2**27, 2**28):
            moved = times * size
            add(1e-5 + moved / device.memory_bandwidth, what="memory", op=op, bytes=moved)
    for group in (g for g in (2, 4, 8) if g <= devices):
        mesh = Mesh((devices // group, group), ("o", "i"))
        for kind in MEASURED_KINDS:
            for size in (2**16, 2**20, 2**24, 2**28):
                time = seconds(kind, ("i",), size, mesh, device)  # type: ignore[arg-type]
                add(time, what="collective", kind=kind, group=group, bytes=size)
    return found


@pytest.mark.parametrize("topology", ["switch", "shared"])
def test_known_figures_come_back(topology: str) -> None:
    known = machine(topology=topology)
    found = calibrate({**FACTS, "device": "other"}, synthetic(known), base=None, name="mine")
    # Without a base the link is a switch: a bus of the same points is one that carries an eighth for each of eight.
    assert found.device.name == "mine"
    assert found.device.flops == pytest.approx(known.flops, rel=1e-6)
    assert found.device.memory_bandwidth == pytest.approx(known.memory_bandwidth, rel=1e-6)
    assert found.device.kernel_overhead == pytest.approx(known.kernel_overhead, rel=1e-6)
    link = found.device.links[0]
    assert link.bandwidth == pytest.approx(3e11 / (8 if topology == "shared" else 1), rel=1e-6)
    if topology == "switch":
        assert link.latency == pytest.approx(2e-6, rel=1e-4)
        assert found.device.collective_overhead == pytest.approx(2e-5, rel=1e-4)
    assert [fit.name for fit in found.fits] == ["launch", "matmul", "memory", "collectives"]
    assert all(fit.r2 == pytest.approx(1) and fit.max_error < 1e-4 for fit in found.fits)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e9, 1e12), st.floats(0, 1e-4), st.integers(0, 2**32))
def test_noise_and_outliers_move_the_figures_little(bandwidth: float, latency: float, seed: int) -> None:
    draw = random.Random(seed)
    known = machine(bandwidth, latency)
    noisy = synthetic(known, noise=lambda: draw.uniform(0.97, 1.03) * (5 if draw.random() < 0.04 else 1))
    try:
        found = calibrate({**FACTS, "device": "other"}, noisy)
    except CalibrationError:  # four launches of which one is an outlier fit nothing
        reject()
    assert found.device.memory_bandwidth == pytest.approx(known.memory_bandwidth, rel=0.6)
    assert found.device.links[0].bandwidth == pytest.approx(bandwidth, rel=0.25)
    assert found.fits[3].median_error < 0.1


def test_what_was_not_measured_is_the_bases() -> None:
    alone = [point for point in synthetic(machine()) if point["what"] != "collective"]
    found = calibrate({**FACTS, "devices": 1}, alone)
    h200 = load_device("h200")
    assert (found.base, found.device.name) == ("h200", "h200-measured")
    assert found.device.links == h200.links
    assert found.device.collective_overhead == h200.collective_overhead
    assert found.device.memory_bytes == h200.memory_bytes
    assert (found.device.achievable_compute, found.device.achievable_memory) == (1.0, 1.0)
    assert found.device.flops["f64"] == pytest.approx(h200.flops["f64"] * 4e14 / h200.flops["f32"])
    measured = calibrate(FACTS | {"memory_bytes": 140 * 10**9}, synthetic(machine()))
    assert [link.name for link in measured.device.links] == ["nvlink", "ib"]
    assert measured.device.links[0].bandwidth == pytest.approx(3e11)
    assert measured.device.links[1] == h200.links[1]
    assert measured.device.memory_bytes == 140 * 10**9
    assert measured.device.memory_limit == h200.memory_limit
    measured = calibrate(FACTS | {"usable_bytes": 120 * 10**9}, synthetic(machine()))
    assert measured.device.memory_limit == 120 * 10**9


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, kind: str) -> None:
    assert calibrate({**FACTS, "device": name}, synthetic(machine())).base == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [("TPU v4", "tpu-v4"), ("TPU v5 lite", "tpu-v5e"), ("TPU v5", "tpu-v5p"), ("TPU v6 lite", "tpu-v6e")],
)
def test_a_tpu_is_known_by_its_name_and_fitted_as_a_torus(name: str, kind: str) -> None:
    base = load_device(kind)
    known = Device("known", "tpu", {"f32": 1e14}, 1e12, None, 1e-6, 1e-5, 1, 1, (base.links[0],), base.chip_devices)
    found = calibrate({**FACTS, "device": name, "platform": "tpu"}, synthetic(known))
    assert found.base == kind
    assert found.device.clock == base.clock
    assert found.device.links[0].bandwidth == pytest.approx(base.links[0].bandwidth, rel=1e-3)
    assert found.device.links[0].latency == pytest.approx(base.links[0].latency, rel=1e-2)


def test_the_file_is_a_device_file(tmp_path: Path) -> None:
    for facts in (FACTS, FACTS | {"device": "TPU v4", "platform": "tpu"}):
        found = calibrate(facts, [*synthetic(machine()), {"skipped": "matmul", "dtype": "i8", "why": "no\nsuch thing"}])
        path = tmp_path / "device.toml"
        path.write_text(to_toml(found))
        device = load_device(path)
        assert device.name == found.device.name
        assert device.flops == pytest.approx(found.device.flops, rel=1e-3)
        assert [link.name for link in device.links] == [link.name for link in found.device.links]
        assert device.links[0].dims == found.device.links[0].dims
        assert device.clock == found.device.clock
        assert device.links[0].wrap_whole == found.device.links[0].wrap_whole
        assert "R2 1.000" in device.source
        assert "# Skipped: matmul i8: no such thing" in path.read_text()
        assert path.read_text() == to_toml(
            calibrate(facts, [*synthetic(machine()), {"skipped": "matmul", "dtype": "i8", "why": "no such thing"}])
        )


def without(what: str, keep: int = 0) -> list[dict[str, Any]]:
    found = synthetic(machine())
    left = [point for point in found if point["what"] == what][:keep]
    return [point for point in found if point["what"] != what] + left


@pytest.mark.parametrize(
    ("found", "facts", "says"),
    [
        (without("launch", 2), {}, "too few points to fit launch: 2, at least 3 are needed"),
        (without("matmul"), {}, "too few points to fit matmul: 0"),
        (without("matmul", 2), {}, "too few points to fit matmul"),
        (without("memory", 1), {}, "too few points to fit memory: 1"),
        (without("collective", 2), {}, "too few points to fit collectives: 2"),
        (without("collective"), {"device": "Riva TNT2"}, "pass --base with the device kind that is nearest"),
        (
            [p | {"seconds": 1 / p["bytes"]} if p["what"] == "memory" else p for p in synthetic(machine())],
            {},
            "what was measured of memory fits no positive bandwidth: the time does not grow with the size",
        ),
        (
            [p | {"seconds": 1e-3 / p["kernels"]} if p["what"] == "launch" else p for p in synthetic(machine())],
            {},
            "fits no positive kernel_overhead",
        ),
    ],
)
def test_what_fits_no_device_is_refused(found: list[dict[str, Any]], facts: dict[str, Any], says: str) -> None:
    with pytest.raises(CalibrationError) as error:
        calibrate({**FACTS, **facts}, found)
    assert says in str(error.value)


def test_names_and_bases_that_cannot_be() -> None:
    with pytest.raises(CalibrationError, match="letters, digits, - and _ only"):
        calibrate(FACTS, synthetic(machine()), name="my machine")
    with pytest.raises(CalibrationError, match="a kind without topology is needed, such as h100"):
        calibrate(FACTS, synthetic(machine()), base="h100:2x8")


# --- measuring ---------------------------------------------------------------------------------------------------


class Fake:
    """A backend that does nothing, and cannot do f64 or i8."""

    name = "fake"

    def __init__(self, platform: str, devices: int) -> None:
        self.platform, self.devices = platform, devices
        self.asked: list[tuple[Any, ...]] = []

    def facts(self) -> dict[str, Any]:
        return {}

    def _run(self, *what: Any) -> Callable[[], None]:
        self.asked.append(what)
        return lambda: None

    def matmul(self, dtype: str, size: int) -> Callable[[], None]:
        if dtype in ("f64", "i8"):
            raise RuntimeError(f"no {dtype} here\nat all")
        return self._run("matmul", dtype, size)

    def memory(self, op: str, bytes: int) -> Callable[[], None]:
        return self._run("memory", op, bytes)

    def launch(self, kernels: int) -> Callable[[], None]:
        return self._run("launch", kernels)

    def collective(self, kind: str, group: int, bytes: int) -> Callable[[], None]:
        return self._run("collective", kind, group, bytes)


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.cost.machine.measure.FULL", QUICKEST)
    backend = Fake("cpu", 8)
    found = list(points(backend, quick=False))
    skipped = [point for point in found if "skipped" in point]
    assert [(point["dtype"], point["why"]) for point in skipped] == [("f64", "no f64 here"), ("i8", "no i8 here")]
    groups = {(point["kind"], point["group"]) for point in found if point.get("what") == "collective"}
    assert groups == {(kind, group) for kind in MEASURED_KINDS for group in (2, 4, 8)}
    copies = [point["bytes"] for point in found if point.get("op") == "copy"]
    assert copies[0] * 8 == 2 * 2**26, "all devices together leave the cache"
    assert not any("collective" in point.values() for point in points(Fake("gpu", 1), quick=False))


@pytest.mark.parametrize(
    ("asked", "jax_has", "cuda", "chosen"),
    [
        (("auto", None), "gpu", True, ("jax", "gpu")),
        (("auto", None), "cpu", True, ("torch", "gpu")),
        (("auto", None), "cpu", False, ("jax", "cpu")),
        (("auto", None), None, False, "neither jax nor torch sees a GPU"),
        (("auto", "gpu"), "cpu", True, ("torch", "gpu")),
        (("auto", "gpu"), "cpu", False, "neither jax nor torch sees a GPU"),
        (("auto", "tpu"), "cpu", True, "no tpu"),
        (("auto", "cpu"), "cpu", True, ("jax", "cpu")),
        (("jax", "gpu"), "cpu", True, "no gpu"),
        (("torch", "cpu"), "gpu", True, ("torch", "cpu")),
    ],
)
def test_which_backend_measures(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[str, str | None], jax_has: str | None, cuda: bool, chosen: Any
) -> None:
    def jax(platform: str | None, devices: int | None) -> Any:
        if jax_has is None or platform not in (None, jax_has):
            raise RuntimeError(f"no {platform}")
        found = Fake(jax_has, devices or 1)
        found.name = "jax"
        return found

    def torch(platform: str | None) -> Any:
        found = Fake(platform or "cpu", 1)
        found.name = "torch"
        return found

    monkeypatch.setattr(measure, "_jax", jax)
    monkeypatch.setattr(measure, "_torch", torch)
    monkeypatch.setattr(measure, "_torch_sees_cuda", lambda: cuda)
    request = {"backend": asked[0], "platform": asked[1], "devices": None}
    if isinstance(chosen, str):
        with pytest.raises(RuntimeError, match=chosen):
            measure._backend(request)
    else:
        found: Any = measure._backend(request)
        assert (found.name, found.platform) == chosen


def test_a_slow_batch_does_not_count() -> None:
    pauses = iter([0.0, 0.0, *[0.05, 0.001, 0.001, 0.001, 0.001] * 2])
    import time

    seconds, spread, batches = timed(lambda: time.sleep(next(pauses)), Budget(0.0, 0.0, 5))
    assert 0.001 <= seconds < 0.02
    assert batches == 5
    assert spread < 10


REAL = """
import json, sys
from autoshard.cost.machine.measure import MEASURED_KINDS, Budget, timed
from autoshard.cost.machine.measure_jax import JaxBackend
backend = JaxBackend("cpu", 2)
runs = [backend.matmul(dtype, 16) for dtype in ("f32", "bf16", "f16", "f64", "i8")]
runs += [backend.memory("copy", 4096), backend.memory("add", 4096), backend.launch(3)]
runs += [backend.collective(kind, 2, 1024) for kind in MEASURED_KINDS]
print(json.dumps([backend.devices, [timed(run, Budget(0.0, 0.0, 1))[0] for run in runs]]))
"""


def test_two_virtual_cpu_devices_are_measured() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, env=_environment(), check=True)
    devices, times = json.loads(done.stdout)
    assert devices == 2
    assert len(times) == 13
    assert all(0 < time < 10 for time in times)


def _environment() -> dict[str, str]:
    home = str(Path(fitting.__file__).resolve().parents[3])
    return os.environ | {"PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "measured", lambda **_: (FACTS, synthetic(machine())))

    def run(*arguments: str) -> tuple[Any, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main(list(arguments))
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return run


def test_the_command_writes_a_kind_that_a_mesh_can_have(run: Any, tmp_path: Path) -> None:
    status, out, err = run("calibrate", "-o", "device.toml", "--json")
    assert (status, err) == (0, "")
    assert "collectives: 60 points, R2 1.000" in out
    said = json.loads(out.splitlines()[-1])
    assert (said["output"], said["device"], said["base"]) == ("device.toml", "h200-measured", "h200")
    assert said["fits"]["collectives"]["values"]["bandwidth"] == pytest.approx(3e11)
    mesh = Mesh((2, 4), device="device.toml:2x4")
    assert seconds("all-gather", ("data",), 1e9, mesh, load_device(mesh.device)) > 0
    assert run("calibrate")[1] == (tmp_path / "device.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--base", "abacus"], "no device kind is called 'abacus'"),
        (["-o", "no/device.toml"], "cannot write no/device.toml"),
        (["--backend", "tensorflow"], "'tensorflow' is not one of 'auto', 'jax', 'torch'"),
        (["--devices", "0"], "0 is not in the range x>=1"),
        (["--name", "a b"], "letters, digits, - and _ only"),
    ],
)
def test_bad_input_of_the_command(run: Any, tmp_path: Path, arguments: list[str], says: str) -> None:
    status, out, err = run("calibrate", *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_fails_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MEASURE_COMMAND", (sys.executable, "-c", "raise SystemExit('no GPU here')"))
    with pytest.raises(CalibrationError, match="measuring with jax failed: no GPU here"):
        fitting.measured(backend="jax")
