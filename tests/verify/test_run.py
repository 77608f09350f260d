"""Runs under a plan on virtual devices against one device; the plans split neighbours differently, on purpose."""

import copy
import dataclasses
import json
import math

import pytest

pytest.importorskip("torch_xla")

import torch

from autoshard.frontends.torch_xla.program import capture
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.plans.annotated import plan_of
from autoshard.sources import Source, load_source
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies import guard
from autoshard.verify import rounding, run_worker
from autoshard.verify.run import Difference, RunError, RunReport, run_equal
from tests.lower.torch_xla.alternating import alternating

MESH = Mesh((2, 2), ("data", "model"))
FILE = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
    return {"model": model, "inputs": (torch.zeros(4, 8),)}
"""


def planned(source, **options):
    program = capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    return alternating(program, MESH, **options)


def test_a_gpt2_trains_with_equal_numbers():
    pytest.importorskip("transformers")
    settings = {"n_layer": "2", "n_embd": "16", "n_head": "2", "vocab_size": "50"}
    source = load_source("hf:gpt2", batch=4, seq=8, settings=settings, train="sgd")
    plan = planned(source, pins=0.15, copies=0.05)
    report = run_equal(plan, source)
    assert report.equal, str(report)
    assert (report.devices, report.optimizer, len(report.losses)) == (4, "SGD", 3)
    assert report.compiled_once
    assert 0 < report.gradients.value < 1e-5
    assert report.losses[0] == pytest.approx(math.log(50), rel=0.05)  # untrained: every token is as likely
    assert json.loads(json.dumps(report.as_dict()))["equal"] is True


def test_a_forward_pass_from_a_file_gives_equal_outputs(tmp_path):
    (tmp_path / "net.py").write_text(FILE)
    source = load_source(f"{tmp_path}/net.py:build")
    report = run_equal(planned(source), source, steps=2)
    assert report.equal, str(report)
    assert report.losses == ()
    assert report.outputs.value < 1e-5
    assert "outputs" in str(report)


def test_a_plan_for_another_program_is_not_run(tmp_path):
    (tmp_path / "net.py").write_text(FILE)
    source = load_source(f"{tmp_path}/net.py:build")
    plan = planned(source)
    (tmp_path / "net.py").write_text(FILE.replace("Tanh", "ReLU"))
    with pytest.raises(RunError, match=r"first difference at op 2: aten.tanh.default -> f32\[4,12\] expected"):
        run_equal(plan, source, steps=1)


AWKWARD = """
import torch
import torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)  # keeps weak references to its weights
        self.conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(8, 8, 3, padding=1))
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.drop = torch.nn.Dropout(drop)

    def forward(self, x):
        x = F.elu(self.lstm(x)[0]) + F.selu(x) + torch.logaddexp(x, -x).median(-1, keepdim=True).values
        x = F.celu(self.conv(x.transpose(1, 2)), 0.5) * self.scale.clone().unsqueeze(1)
        x = self.drop(x).view(4, 2, 2, 2, 2, 2).permute(0, 2, 4, 1, 3, 5) * 1.5  # more dims than OpSharding takes
        return x.flatten(1).square().mean()

def build(drop=0.0):
    torch.manual_seed(0)
    return {"model": Net(drop), "inputs": (torch.zeros(4, 4, 8),), "loss_fn": lambda loss: loss}
"""


@pytest.mark.parametrize(
    ("drop", "reference"), [("0.0", "PyTorch in float64"), ("0.5", "torch_xla, not split")], ids=["exact", "random"]
)
def test_what_torch_xla_has_no_lowering_or_a_wrong_one_for_trains_with_equal_numbers(tmp_path, drop, reference):
    (tmp_path / "net.py").write_text(AWKWARD)
    source = load_source(f"{tmp_path}/net.py:build", settings={"drop": drop}, train="sgd")
    graph = build_graph(capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer))
    many = [value for value in graph.aten_outputs.values() if len(graph.type_of(value).shape) == 6]
    split = (("data",), (), ("model",), (), (), ())
    plan = plan_of(graph, MESH, Annotations(dict.fromkeys(many, split), {}))
    assert len(plan.activations) >= 4
    report = run_equal(plan, source, steps=2)
    assert report.equal, str(report)
    assert report.reference == reference
    assert report.losses[0] != report.losses[1]


CONVOLVED = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x):
        return self.conv(x).square().mean()

def build():
    torch.manual_seed(0)
    return {"model": Net(), "inputs": (torch.zeros(4, 8, 4),), "loss_fn": lambda loss: loss}
"""


def test_a_convolution_that_xla_would_sum_wrongly_is_right_once_guarded(tmp_path):
    """Found with a random plan that split a weight-normed convolution's kernel in space: losses four times as large."""
    (tmp_path / "net.py").write_text(CONVOLVED)
    source = load_source(f"{tmp_path}/net.py:build", train="sgd")
    graph = build_graph(capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer))
    convolution = next(op for op in graph.ops if op.kind == "convolution")
    kernel = graph.aten_outputs[convolution.aten - 1, 0]
    assert graph.type_of(kernel).shape == (8, 8, 3)
    roles = [argument.role for argument in graph.program.arguments]
    x = Value(graph.arguments[roles.index("input")])
    annotations = Annotations({x: (("data",), (), ())}, {(kernel, convolution.aten): ((), (), ("model",))})
    assert guard.overcounted(graph, annotations, MESH)
    report = run_equal(plan_of(graph, MESH, guard.guarded(graph, annotations, MESH)), source, steps=1)
    assert report.equal, str(report)


VIEWS = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return (x @ x.mT).diagonal(0, 1, 2) * 2

def build():
    return {"model": Net(), "inputs": (torch.zeros(4, 8, 8),)}
"""


def test_copies_of_views_that_a_decomposition_makes_hold_the_right_elements(tmp_path):
    (tmp_path / "net.py").write_text(VIEWS)
    source = load_source(f"{tmp_path}/net.py:build")
    program = capture(source.model, source.inputs)
    graph = build_graph(program)
    chosen = next(op for op in program.ops if op.name == "aten.where.self")
    read = {value for op in graph.ops if op.aten == chosen.index for value in op.operands}
    squares = [value for value in read & {*graph.aten_outputs.values()} if graph.type_of(value).shape == (4, 8, 8)]
    copies = {(value, chosen.index): (("model",), (), ()) for value in squares}
    assert copies
    report = run_equal(plan_of(graph, MESH, Annotations({}, copies)), source, steps=1)
    assert report.equal, str(report)


HALF = """
import torch

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).bfloat16()
    return {"model": model, "inputs": (torch.zeros(16, 256, 8).bfloat16(),), "loss_fn": lambda y: y.float().square().mean()}
"""  # noqa: E501


def test_half_precision_is_compared_with_sums_of_the_same_precision(tmp_path):
    """XLA's CPU kernels add 4,096 terms of a bias's gradient up in bf16, where PyTorch's take float32."""
    (tmp_path / "net.py").write_text(HALF)
    source = load_source(f"{tmp_path}/net.py:build", train="sgd")
    graph = build_graph(capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer))
    weights = [
        value
        for value, argument in zip(graph.arguments, graph.program.arguments, strict=True)
        if argument.name == "2.weight"
    ]
    report = run_equal(plan_of(graph, MESH, Annotations({Value(w): (("data",), ()) for w in weights}, {})), source, 1)
    assert report.equal, str(report)
    assert report.reference == "torch_xla, not split"


def test_what_cannot_be_sent_to_another_process_is_refused():
    model = torch.nn.Linear(8, 8)
    source = Source(model, (torch.zeros(4, 8),), loss_fn=lambda output: output.sum(), train=True)
    with pytest.raises(RunError, match=r"name it FILE\.py:FUNCTION"):
        run_equal(planned(source), source)


def test_the_judgement():
    none = Difference(0.0)
    report = RunReport(8, "SGD", (1.0,), (1.0,), 1e-6, Difference(2e-6, "w"), Difference(3e-6, "w"), none, 1e-5, True)
    assert report.equal
    assert not dataclasses.replace(report, loss=2e-5).equal
    assert not dataclasses.replace(report, loss=math.nan).equal
    assert not dataclasses.replace(report, gradients=Difference(2e-5, "w")).equal
    moved = dataclasses.replace(report, parameters=Difference(1e-4, "w"))
    assert not moved.equal
    assert dataclasses.replace(moved, optimizer="AdamW").equal
    assert "NUMBERS DIFFER" in str(moved)


def test_what_is_excused_is_counted_and_too_much_of_it_decides_nothing():
    none = Difference(0.0)
    report = RunReport(8, "SGD", (1.0,), (1.0,), 0.0, none, none, none, 1e-5, True, compared=40)
    assert (report.status, report.equal) == ("equal", True)
    some = dataclasses.replace(report, excused=(("w", "sums of a batch norm"),) * 2)
    assert (some.status, some.equal) == ("excused", True)
    assert "2 of 40 compared" in str(some)
    assert "sums of a batch norm: w, w" in str(some)
    much = dataclasses.replace(report, excused=(("w", "sums of a batch norm"),) * 3)
    assert (much.status, much.equal) == ("not decided", False)
    assert "NOT DECIDED" in str(much)
    assert dataclasses.replace(much, buffers=Difference(1.0, "b")).status == "differ"


POISON = "raise SystemExit('a file of the current folder was run')"
IMPORTS = """
import torch
from parts import width

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.down = torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 4)

    def forward(self, x):
        return self.down(self.norm(x)).square().mean()

def build():
    torch.manual_seed(0)
    return {"model": Net(), "inputs": (torch.zeros(16, width),), "loss_fn": lambda loss: loss}
"""


def test_files_of_the_current_folder_hide_no_library_and_buffers_are_compared(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(IMPORTS)
    (tmp_path / "parts.py").write_text("width = 8")
    source = load_source(f"{tmp_path}/net.py:build", train="sgd")
    graph = build_graph(capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer))
    plan = plan_of(graph, MESH, Annotations({}, {}))
    for name in ("random", "numpy", "torch", "copy"):
        (tmp_path / f"{name}.py").write_text(POISON)
    monkeypatch.chdir(tmp_path)
    report = run_equal(plan, source, steps=2)
    assert report.status != "differ", str(report)
    assert report.buffers.where.startswith("norm.")
    assert report.compared - report.captured == 2 + 4 + 4 + 3  # losses, gradients, parameters, buffers
    assert report.captured == 1 + 4 + 4 + 3  # the loss, parameters, their momentum, buffers


def test_differences_are_relative_to_the_largest_element_and_never_hidden():
    a, b = {"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([1.0, 5.0])}
    assert run_worker._largest(a, b, {"w": 5.0}) == {"value": 0.2, "where": "w"}
    assert run_worker._largest(a, b, {"w": 1.0}) == {"value": 1.0, "where": "w"}
    assert run_worker._largest({"w": torch.tensor([math.nan])}, {"w": torch.ones(1)}, {"w": 1.0})["value"] == math.inf
    assert run_worker._largest({}, b, {"w": 5.0})["value"] == math.inf


def test_batches_are_new_each_step_and_the_same_each_time():
    with torch.device("meta"):
        model = torch.nn.Embedding(7, 3)
    tokens = torch.empty(4, 5, dtype=torch.int64, device="meta")
    source = Source(model, {"input": tokens, "again": tokens, "attention_mask": torch.empty_like(tokens)})
    first, same, second = (run_worker.random_batch(source, model, step) for step in (0, 0, 1))
    assert first["input"].equal(same["input"])
    assert not first["input"].equal(second["input"])
    assert first["again"] is first["input"]
    assert 0 <= int(first["input"].min()) <= int(first["input"].max()) < 7
    assert bool(first["attention_mask"].all())


def test_integers_are_the_samples_where_the_program_has_read_values():
    """Other edges of a graph are another number of self-loops, and another program."""
    edges = torch.arange(12).reshape(2, 6)
    source = Source(torch.nn.Linear(4, 1), (torch.randn(4, 4), edges))
    values, same = run_worker.random_batch(source, source.model, 1, ("a read",))
    assert same.equal(edges)
    assert not values.equal(source.inputs[0])
    assert not run_worker.random_batch(source, source.model, 1)[1].equal(edges)


def test_floats_that_are_never_negative_stay_so():
    """Targets of a binary cross entropy had been drawn from a normal distribution, which it refuses."""
    model = torch.nn.Linear(4, 1)
    chances = torch.tensor([0.0, 0.25, 1.0, 0.5])
    source = Source(model, (torch.randn(4, 4), chances, torch.zeros(8), torch.full((4,), 1e-41)))
    values, targets, zeros, held = run_worker.random_batch(source, model, 0)
    assert sorted(targets.tolist()) == sorted(chances.tolist())
    assert all(float(each.min()) < 0 for each in (values, zeros, held))
    assert not any(bool((run_worker.random_batch(source, model, step)[1] < 0).any()) for step in range(4))


def test_weights_are_made_for_a_model_on_meta_and_kept_otherwise():
    with torch.device("meta"):
        bare = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    made = run_worker.with_weights(bare)
    assert made[0].weight.abs().max() > 0
    assert made[1].weight.equal(torch.ones(4))
    assert run_worker.with_weights(made)[0].weight.equal(made[0].weight)
    bare.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(RunError, match="buffer table"):
        run_worker.with_weights(bare)


class Cancels(torch.nn.Module):
    """The gradient of `shift` is zero in exact arithmetic: softmax does not see it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.randn(50))
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (torch.softmax(x * self.scale + self.shift, -1) * x).sum()


def judged(module, x, planned, steps=1):
    """Of the numbers `planned(run on one device)`, those that are off from float64, and of those what is rounding."""
    batches = [x] * steps
    source = Source(module, x, train=True)
    one_device = run_worker._Run(copy.deepcopy(module), source).steps(batches, lambda batch: batch, None)
    found = run_worker._Run(copy.deepcopy(module), source)
    found.losses, found.gradients = one_device.losses, {**one_device.gradients, **planned(one_device.gradients)}
    exact = run_worker._exact(module, source, batches)
    off = rounding.off(found.numbers(), exact.numbers(), 1e-5)
    return off, list(run_worker._rounding(off, found, one_device, module, source, batches, 1e-5))


def test_a_gradient_that_is_zero_in_exact_arithmetic_is_judged_on_the_scale_of_the_others():
    x = (torch.randn(64, 50, generator=torch.Generator().manual_seed(1)),)
    shift, scale = ("gradients", "shift"), ("gradients", "scale")
    assert judged(Cancels(), x, lambda g: {"shift": -2 * g["shift"]}) == ([], [])
    assert judged(Cancels(), x, lambda g: {"shift": g["shift"] + 1e-4 * g["scale"].abs().max()}) == ([shift], [])
    assert judged(Cancels(), x, lambda g: {"scale": g["scale"] * 1.001}) == ([scale], [])


class Undecided(torch.nn.Module):
    """A ReLU's input is the difference of two equal numbers, but for their last bits: its gradient is there or not."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.7, 0.3]))
        self.other = torch.nn.Parameter(torch.tensor([1.0]))

    def forward(self, x):
        a, b = self.weight
        return torch.relu(a * x - b * x - 0.4 * x).sum() + a * a + (self.other * x).sum()


def test_numbers_are_apart_where_one_is_nan_or_imaginary():
    nothing, one, far = math.nan, torch.tensor([1.0, 2.0]), torch.tensor([math.inf, 2.0])
    assert rounding.apart(one, one) == rounding.apart(far, far) == 0.0
    assert rounding.apart(torch.tensor([1.0, nothing]), torch.tensor([1.5, nothing])) == 0.5
    assert rounding.apart(torch.tensor([1.0, nothing]), one) == rounding.apart(far, one) == math.inf
    expected, found = torch.tensor([1.0, nothing]), torch.tensor([1.5, nothing])
    assert rounding.off({("outputs", ""): found}, {("outputs", ""): expected}, 1e-5) == [("outputs", "")]
    assert rounding.apart(torch.tensor([1 + 2j]), torch.tensor([1 + 5j])) == 3.0


def test_a_gradient_behind_an_undecided_relu_is_told_apart_from_a_wrong_one():
    """Found with mobilenet_v1 at random weights: its gradients jump by 1 % where a weight's last bit changes."""
    x = (torch.ones(1),)
    other_side = lambda g: {"weight": torch.tensor([2.4 if g["weight"][1] == 0 else 1.4, g["weight"][1] - 1])}  # noqa: E731
    weight, other = ("gradients", "weight"), ("gradients", "other")
    assert judged(Undecided(), x, other_side) == ([weight], [weight])
    assert judged(Undecided(), x, lambda g: {"weight": g["weight"] + 30}) == ([weight], [])
    assert other in judged(Undecided(), x, lambda g: {"other": g["other"] * 1.001})[0]
    assert other not in judged(Undecided(), x, lambda g: {"other": g["other"] * 1.001})[1]
