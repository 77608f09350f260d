"""`plan(..., confirm=…)`, with compilers played: which plans they are asked about, and what comes of their answers."""

from importlib import metadata
from types import SimpleNamespace

import pytest

import autoshard
from autoshard.mesh import Mesh
from autoshard.planning import confirm
from autoshard.planning.candidate import Candidate, Chosen
from autoshard.planning.confirm import confirmed
from autoshard.planning.options import PlanningOptions
from autoshard.plans.value import Confirmation, NoPlanError
from autoshard.verify.compile import CompileError, OutOfMemoryError
from autoshard.verify.targets import Target, TargetError

torch = pytest.importorskip("torch")

MESH = Mesh((2, 4), device="cpu")
GRAPH = SimpleNamespace(program=None, ops=())


class Road:
    """Plans as large as the limit allows, of at least `least` bytes by prediction.

    Attributes:
        asked: the limits.
    """

    def __init__(self, least=10):
        self.least, self.asked = least, []

    def __call__(self, options):
        self.asked.append(limit := options.memory_on(MESH))
        if limit is not None and limit < self.least:
            raise NoPlanError(f"the least is {self.least}", self.least)
        prediction = SimpleNamespace(peak_memory_bytes=1000 if limit is None else limit, specs={})
        return Chosen(Candidate(MESH, None, prediction, memory=limit, graph=GRAPH))


@pytest.fixture
def compiler(monkeypatch):
    """A compiler of which `answer` gives the bytes of a plan from what is predicted of it; its calls are kept."""
    said = SimpleNamespace(calls=[], answer=lambda predicted: predicted, seconds=0.0, clock=0.0)

    def compile_annotated(graph, mesh, target, predicted, *, timeout):
        said.calls.append((predicted, timeout, str(target)))
        said.clock += said.seconds
        found = said.answer(predicted)
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(memory=SimpleNamespace(peak=found))

    def annotate(program, graph, annotations, mesh, platform):
        return said.predicted

    def bytes_of(self, found):
        said.predicted = found.predicted_bytes
        return compiled(self, found)

    compiled = confirm._Confirming.compiled
    monkeypatch.setattr(confirm._Confirming, "compiled", bytes_of)
    monkeypatch.setattr(confirm, "annotate", annotate)
    monkeypatch.setattr(confirm, "compile_annotated", compile_annotated)
    monkeypatch.setattr(confirm, "time", SimpleNamespace(perf_counter=lambda: said.clock))
    monkeypatch.setattr(Target, "packages", lambda self: {"jax": "1.0", "libxyz": "2.0"})
    return said


def ask(road, **options):
    return confirmed(road, PlanningOptions(**{"memory": 100, "confirm": "auto", **options}))


def test_a_plan_that_fits_as_compiled_is_the_plan(compiler):
    found, said = ask(Road())
    assert found.predicted_bytes == 100
    assert said == Confirmation("fits", "cpu", "libxyz 2.0", 100, 1, 0.0, "")


def test_a_plan_that_does_not_fit_is_planned_again_within_less(compiler):
    road = Road()
    compiler.answer = lambda predicted: int(predicted * 1.25)
    found, said = ask(road)
    assert road.asked == [100, 79]
    assert (found.predicted_bytes, said.verdict, said.compiled_bytes, said.compiles) == (79, "fits", 98, 2)
    assert found.candidate.memory == 100, "the limit in the plan is the one that was asked for"


def test_three_plans_are_compiled_at_most(compiler):
    road = Road()
    compiler.answer = lambda predicted: 101 + predicted
    found, said = ask(road)
    assert [predicted for predicted, *_ in compiler.calls] == road.asked[:3]
    assert found.predicted_bytes == road.asked[3] < road.asked[2]
    assert (said.verdict, said.compiled_bytes, said.compiles) == ("not confirmed", None, 3)
    least = min(101 + predicted for predicted, *_ in compiler.calls)
    assert said.note == f"not compiled; the least of 3 that were takes {least} bytes per device"


def test_no_more_than_300_seconds_are_spent(compiler):
    compiler.answer, compiler.seconds = lambda predicted: predicted + 101, 200.0
    _, said = ask(Road())
    assert [timeout for _, timeout, _ in compiler.calls] == [300.0, 100.0]
    assert (said.verdict, said.compiles, said.seconds) == ("not confirmed", 2, 400.0)


def test_where_less_is_not_predicted_the_plan_of_least_memory_is_compiled(compiler):
    road = Road(least=90)
    compiler.answer = {100: 140, 90: 95}.__getitem__
    found, said = ask(road)
    assert road.asked == [100, 70, 90]
    assert (found.predicted_bytes, said.compiled_bytes) == (90, 95)


def test_a_plan_that_is_hardly_smaller_is_not_compiled(compiler):
    """Llama 3 8B on eight H100s within 22 GB: 19.797 GB are predicted, 22.6 compiled; the least predicted is 19.796."""
    compiler.answer = lambda predicted: predicted + 600
    with pytest.raises(NoPlanError, match="the least of 1 that libxyz"):
        ask(Road(least=9999), memory=10_000)


def test_where_nothing_fits_as_compiled_the_error_says_what_was_compiled(compiler):
    compiler.answer = lambda predicted: predicted + 60
    with pytest.raises(NoPlanError, match=r"fits 100 bytes .* as compiled: the least of 3 that libxyz 2\.0") as error:
        ask(Road(least=50))
    assert "takes 110 bytes per device, and of a smaller one, the least is 50" in str(error.value)
    assert error.value.least == 110


@pytest.mark.parametrize(("memory", "times"), [(124, 1), (126, 0), (None, 0)])
def test_only_a_plan_predicted_near_the_limit_is_compiled(compiler, memory, times):
    def road(options):
        return Chosen(
            Candidate(MESH, None, SimpleNamespace(peak_memory_bytes=100, specs={}), memory=options.memory, graph=GRAPH)
        )

    _, said = ask(road, memory=memory)
    assert len(compiler.calls) == times
    assert (said is None) == (times == 0)
    _, said = ask(road, memory=memory, confirm="always")
    assert (said.verdict, said.compiled_bytes) == ("fits", 100)


def test_what_the_compiler_says_of_the_devices_memory_is_the_limit_too(compiler):
    road = Road()
    compiler.answer = lambda predicted: OutOfMemoryError("too much", 2 * predicted, 60) if predicted > 30 else predicted
    found, said = ask(road)
    assert road.asked == [100, 29]
    assert (found.predicted_bytes, said.verdict) == (29, "fits")
    compiler.answer = lambda predicted: OutOfMemoryError("too much") if predicted > 900 else predicted
    found, said = ask(road, memory=None, confirm="always")
    assert (found.predicted_bytes, said.verdict, said.compiles) == (792, "fits", 2)


def test_a_plan_on_another_mesh_is_compiled_for_that(compiler):
    def road(options):
        mesh = Mesh((2, 4), device="tpu-v5e") if options.memory == 100 else Mesh((8, 1), device="tpu-v5e:8x1")
        return Chosen(
            Candidate(
                mesh,
                None,
                SimpleNamespace(peak_memory_bytes=options.memory, specs={}),
                memory=options.memory,
                graph=GRAPH,
            )
        )

    compiler.answer = lambda predicted: predicted + 10
    _, said = ask(road)
    assert [target for *_, target in compiler.calls] == ["tpu-v5e:2x4", "tpu-v5e:8x1"]
    assert said.target == "tpu-v5e:8x1"


def test_another_error_of_the_compiler_confirms_nothing(compiler):
    compiler.answer = lambda predicted: CompileError("the compiler crashed\nat length")
    found, said = ask(Road())
    assert found.predicted_bytes == 100
    assert (said.verdict, said.note, said.compiles) == ("not confirmed", "the compiler crashed", 1)


# --- plan() itself -----------------------------------------------------------------------------------------------


def network():
    return torch.nn.Linear(64, 64), torch.zeros(32, 64)


def test_never_touches_no_compiler(monkeypatch):
    def touched(*_, **__):
        raise AssertionError("a compiler was asked for")

    monkeypatch.setattr(confirm, "compile_annotated", touched)
    monkeypatch.setattr(Target, "packages", touched)
    peak = autoshard.plan(*network(), mesh="2x4", device="tpu-v5e").predicted.peak_memory_bytes
    plan = autoshard.plan(*network(), mesh="2x4", device="tpu-v5e", memory=peak)
    assert plan.confirmed is None
    assert plan.info.keys() <= {"prices", "hidden", "bars"}


@pytest.mark.parametrize(
    ("device", "package", "extra"), [("tpu-v5e", "libtpu", "tpu"), ("h100", "jax-cuda12-plugin", "gpu")]
)
def test_without_the_compiler_nothing_is_confirmed(monkeypatch, device, package, extra):
    def version(name, real=metadata.version):
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    peak = autoshard.plan(*network(), mesh="2x4", device=device).predicted.peak_memory_bytes
    plan = autoshard.plan(*network(), mesh="2x4", device=device, memory=peak, confirm="auto")
    assert (plan.confirmed.verdict, plan.confirmed.compiles) == ("not confirmed", 0)
    wanted = f"{package} is not installed; pip install 'autoshard[{extra}]' brings it"
    assert plan.confirmed.note.endswith(wanted)
    assert f"  as compiled    not confirmed: {plan.confirmed.note}\n" in str(plan)
    monkeypatch.setattr(autoshard.api, "capture", None)  # refused before anything is captured
    with pytest.raises(TargetError, match=f"{package} is not installed"):
        autoshard.plan(*network(), mesh="2x4", device=device, confirm="always")


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match="confirm is never, auto, always, not 'perhaps'"):
        PlanningOptions(confirm="perhaps")
