"""`plan()` from a PyTorch module to a plan: what is asked is kept, equal calls give equal bytes, errors say what."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.cost.predict import predict
from autoshard.mesh import Mesh, spec_axes
from autoshard.planning import one_mesh
from autoshard.planning.meshes import candidate_meshes, factorisations
from autoshard.planning.one_mesh import OneMesh
from autoshard.plans.value import NoPlanError
from autoshard.program import Program
from autoshard.solver.objective import evaluate as evaluate_choice
from autoshard.stablehlo.reader import build_graph
from autoshard.strategies.formulate import formulate
from autoshard.strategies.random_plans import random_annotations

MESH = Mesh((2, 4), device="tpu-v5e")


class Net(torch.nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(256, 1024)
        self.down = torch.nn.Linear(1024, 256)
        self.norm = torch.nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


def net() -> Net:
    with torch.device("meta"):
        return Net()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


INPUTS = torch.empty(512, 256, device="meta")


@pytest.fixture(scope="module")
def program() -> Program:
    return autoshard.capture(net(), INPUTS, loss_fn=loss, optimizer=adamw)


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.plan(net(), INPUTS, mesh=MESH, loss_fn=loss, optimizer=adamw)


def test_a_training_step_is_planned_with_a_proof(plan: autoshard.Plan):
    assert plan.program.kind == "train"
    assert set(plan.parameters) == {f"{m}.{t}" for m in ("up", "down", "norm") for t in ("weight", "bias")}
    assert plan.solver is not None
    assert plan.solver.status == "optimal"
    assert plan.solver.gap == 0
    assert plan.replicated_ops == ()


def test_states_have_the_sharding_of_their_parameter(plan: autoshard.Plan):
    for name, state in plan.optimizer_state.items():
        assert state.spec == plan.parameters[name.rpartition(".")[0]].spec


def test_the_same_call_gives_the_same_bytes(plan: autoshard.Plan):
    again = autoshard.plan(net(), INPUTS, mesh=MESH, loss_fn=loss, optimizer=adamw)
    assert again.to_json() == plan.to_json()


def test_weights_or_none_make_the_same_plan(plan: autoshard.Plan):
    again = autoshard.plan(Net(), torch.randn(512, 256), mesh=MESH, loss_fn=loss, optimizer=adamw)
    assert again.to_json() == plan.to_json()


def test_a_plan_survives_its_file(plan: autoshard.Plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert autoshard.Plan.load(tmp_path / "plan.json") == plan


def test_evaluate_says_of_a_plan_what_plan_predicted(plan: autoshard.Plan, program: Program):
    found = autoshard.evaluate(program, plan)
    assert found.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-6)
    assert found.peak_memory_bytes == plan.predicted.peak_memory_bytes


def test_where_the_default_limit_is_in_the_way_the_error_says_whose_it_is():
    large = torch.zeros(40_000, 1024, 1024, device="meta")
    with pytest.raises(
        NoPlanError, match=r"\. 16,909,000,000 bytes is what runtimes leave of the device kind's memory"
    ):
        autoshard.plan(torch.nn.GELU(), large, mesh=MESH.shape, device="tpu-v5e")


@pytest.mark.parametrize("name", ["dp", "fsdp", "megatron"])
def test_no_manual_plan_is_predicted_faster(name: str, plan: autoshard.Plan, program: Program):
    by_hand = autoshard.manual_plan(name, program, MESH)
    assert plan.predicted.overlapped_s <= by_hand.predicted.overlapped_s * (1 + 1e-9)


def test_what_had_to_be_changed_after_the_solver_is_not_called_optimal(program: Program, monkeypatch):
    monkeypatch.setattr(
        one_mesh, "guarded", lambda graph, chosen, mesh: replace(chosen, pins=dict([*chosen.pins.items()][:-1]))
    )
    plan = autoshard.plan_program(program, MESH)
    assert plan.solver is not None
    assert plan.solver.status == "feasible"
    assert plan.solver.bound <= plan.solver.objective


def test_a_hint_is_kept(program: Program):
    wanted = (("model",), ("data",))
    found = autoshard.plan_program(program, MESH, hints={"up.weight": wanted})
    assert found.parameters["up.weight"].spec == wanted
    assert found.options.hints == {"up.weight": wanted}


def test_a_hint_may_be_written_as_on_the_command_line(program: Program):
    found = autoshard.plan_program(program, MESH, hints={"up.weight": "[model],[]"})
    assert found.parameters["up.weight"].spec == (("model",), ())


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"up.wieght": "[model],[]"}, "did you mean up.weight"),
        ({"up.weight": "[model],[],[]"}, "up.weight has 2 dims, but the spec .* has 3"),
        ({"up.weight": "[tensor],[]"}, "no mesh axis is called 'tensor'; the mesh has data, model"),
        ({"up.weight": "[model],[model]"}, "'model' appears twice"),
        ({"up.weight": "model"}, "a spec is one bracketed axis list per dim"),
    ],
)
def test_a_hint_that_fits_nothing_is_refused(program: Program, hints, said: str):
    with pytest.raises(ValueError, match=said):
        autoshard.plan_program(program, MESH, hints=hints)


def test_a_memory_limit_is_kept_and_costs_time(program: Program):
    free = autoshard.plan_program(program, MESH, memory=None)
    graph = build_graph(program)
    problem = formulate(graph, MESH, _device(), memory=1e12).problem
    unlimited = evaluate_choice(problem, OneMesh(graph, MESH).candidate(1e12).decision.solution.choice)
    limit = unlimited.peak * 0.9
    limited = OneMesh(graph, MESH).candidate(limit).decision
    kept = evaluate_choice(formulate(graph, MESH, _device(), memory=limit).problem, limited.solution.choice)
    assert kept.peak <= limit
    assert limited.solution.objective >= free.solver.objective


def test_a_limit_that_nothing_meets_says_the_least_that_is_possible(program: Program):
    with pytest.raises(autoshard.PlanError, match=r"mesh 2x4: .* 1,000 bytes per device: the least possible peak is"):
        autoshard.plan_program(program, MESH, memory=1000)


def test_hints_that_contradict_each_other_are_refused(program: Program):
    """A state must have its parameter's sharding."""
    hints = {"up.weight": "[model],[]", "up.weight.exp_avg": "[data],[]"}
    with pytest.raises(autoshard.PlanError, match="no plan exists on mesh 2x4"):
        autoshard.plan_program(program, MESH, hints=hints)


def test_predictions_follow_from_the_annotations_whatever_they_are(program: Program):
    graph = build_graph(program)
    for seed in range(5):
        drawn = random_annotations(graph, MESH, seed)
        assert random_annotations(graph, MESH, seed) == drawn
        assert predict(graph, drawn, MESH).step_time_s > 0
        assert all(spec_axes(spec) <= {"data", "model"} for spec in drawn.pins.values())


def test_without_a_mesh_every_shape_is_tried(program: Program):
    shapes = candidate_meshes(None, 4, "tpu-v5e")
    best = autoshard.plan_program(program, shapes)
    times = [autoshard.plan_program(program, mesh).predicted.overlapped_s for mesh in shapes]
    assert best.predicted.overlapped_s == min(times)


def test_factorisations():
    assert factorisations(8) == [(8,), (2, 4), (2, 2, 2), (4, 2)]
    assert factorisations(1) == [(1,)]
    assert factorisations(7) == [(7,)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "pass a mesh such as mesh='2x4', or devices=8"),
        ({"mesh": "2x4", "devices": 8}, "not both"),
        ({"devices": 0}, "at least one"),
        ({"mesh": "2by4"}, "numbers joined by x"),
        ({"mesh": Mesh((2, 2)), "frontend": "jax"}, "there are auto, torch_xla, torchax"),
        ({"mesh": "2x4", "device": "tpu-v9"}, "tpu-v9"),
        ({"mesh": "2x4", "memory": -1}, "must be positive"),
    ],
)
def test_bad_options_are_refused(arguments, said: str):
    with pytest.raises(ValueError, match=said):
        autoshard.plan(net(), INPUTS, **arguments)


def test_importing_autoshard_imports_nothing_heavy():
    code = "import sys, autoshard; print([m for m in ('torch', 'jax', 'numba', 'ortools') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _device():
    from autoshard.cost.machine.device import load_device

    return load_device(MESH.device)


def test_what_is_fed_is_split_as_it_is_read():
    """A decoding step: cached keys are inputs, read by heads, and large."""

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query = torch.nn.Linear(1024, 1024, bias=False)

        def forward(self, x, keys, ids):
            query = self.query(x).view(4, 16, 1, 64)
            return torch.softmax(query @ keys.transpose(-1, -2), -1) + ids[:, None, None, None]

    inputs = torch.zeros(4, 1024), torch.zeros(4, 16, 4096, 64), torch.zeros(4, dtype=torch.int64)
    found = autoshard.plan(Step(), inputs, mesh=autoshard.Mesh((16,), ("x",), device="h100:2x8"))
    assert found.inputs["keys"].spec == ((), ("x",), (), ())
    assert "(optimizer step)" not in str(found)


@pytest.mark.parametrize("device", ["tpu-v6e:2x4", "h100:8"])
def test_a_norm_that_layers_share_leaves_the_batch_split(device: str) -> None:
    """Its gradient is a sum over its uses; one group of all could split the batch of one use alone."""
    norm = torch.nn.RMSNorm(1024, device="meta")

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm
            self.linears = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = x + linear(self.norm(x))
            return x.square().mean()

    with torch.device("meta"):
        model = Layers()
        x = torch.empty(8, 4096, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.capture(model, x, loss_fn=lambda y: y, optimizer=optimizer)
    mesh = Mesh((8,), device=device)
    found = autoshard.plan_program(step, mesh, rivals=False)
    by_hand = autoshard.manual_plan("dp", step, mesh)
    assert found.predicted.overlapped_s <= by_hand.predicted.overlapped_s


@pytest.mark.parametrize("weights", [False, True])
def test_attention_of_torch_leaves_the_batch_split(weights: bool) -> None:
    """torch merges positions before the batch for the last product, and behind that merge no batch is split."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(256, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.attention(x, x, x, need_weights=weights)[0]).square().mean()

    with torch.device("meta"):
        model, x = Layer(), torch.empty(8, 512, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.capture(model, x, loss_fn=lambda y: y, optimizer=optimizer)
    by_hand = autoshard.manual_plan("dp", step, Mesh((8,), device="tpu-v5e:2x4"))
    assert {each.kind for each in by_hand.predicted.collectives} == {"all-reduce"}


def test_the_head_of_a_decoding_step_reads_no_slice_of_a_whole_table() -> None:
    """A tied table. Its slice cost nothing: no product follows the head, as none follows an update."""

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(128256, 4096)
            self.middle = torch.nn.Linear(4096, 4096)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(self.middle(self.table(ids)), self.table.weight).argmax(-1)

    with torch.device("meta"):
        model = Step().to(torch.bfloat16).eval()
    ids = torch.zeros(8, 1, dtype=torch.int64)
    step = autoshard.capture(model, (ids,))
    found = autoshard.plan_program(step, Mesh((2, 4), device="h100:8"), rivals=False)
    assert found.parameters["table.weight"].spec != ((), ())
    assert found.predicted.step_time_s == pytest.approx(found.solver.objective, rel=0.2)


def test_rows_that_a_kernel_gathers_again_are_split_like_their_users():
    """Messages along edges: gathered gradients cost nothing by themselves, whole or split; whole they are moved."""
    nodes, edges, width = 16384, 131072, 512

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = torch.nn.Linear(128, width), torch.nn.Linear(width, 47)
            self.messages = torch.nn.ModuleList(torch.nn.Linear(2 * width, width) for _ in range(2))
            self.updates = torch.nn.ModuleList(torch.nn.GRUCell(width, width) for _ in range(2))

        def forward(self, x, ends):
            h, (source, target) = torch.relu(self.into(x)), ends
            for message, update in zip(self.messages, self.updates, strict=True):
                sent = torch.relu(message(torch.cat([h[source], h[target]], 1)))
                ones = torch.ones_like(target, dtype=h.dtype)
                degree = torch.zeros_like(h[:, 0]).index_add(0, target, ones).clamp(min=1)
                h = update(torch.zeros_like(h).index_add(0, target, sent) / degree[:, None], h)
            return self.out(h)

    ends = torch.randint(0, nodes, (2, edges))
    inputs = (torch.randn(nodes, 128, dtype=torch.bfloat16), ends, torch.randint(0, 47, (nodes,)))
    found = autoshard.plan(
        Net().bfloat16(),
        inputs,
        loss_fn=lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels),
        optimizer=lambda own: torch.optim.AdamW(own),
        mesh="2x4",
        device="h100:8",
    )
    gathered = [each.bytes for each in found.predicted.collectives if each.kind == "all-gather"]
    assert max(gathered) < edges * width * 2
