"""Where a step's time goes, per module and phase."""

import pytest

import autoshard
from autoshard.cost.breakdown import by_module
from autoshard.cost.predict import predict
from autoshard.manual import fsdp
from autoshard.mesh import Mesh
from autoshard.stablehlo.reader import build_graph

torch = pytest.importorskip("torch")
pytest.importorskip("torch_xla", reason="captures a program through torch_xla (the extra xla)")


@pytest.fixture(scope="module")
def shares():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    program = autoshard.capture(
        model,
        (torch.zeros(32, 64), torch.zeros(32, 64)),
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    graph, mesh = build_graph(program), Mesh((2, 2), device="h100")
    prediction = predict(graph, fsdp(graph, mesh), mesh)
    return prediction, by_module(graph, prediction)


def test_the_shares_add_up_to_the_step(shares):
    prediction, parts = shares
    assert sum(part.compute_s for part in parts.values()) == pytest.approx(prediction.compute_s)
    assert sum(part.communication_s for part in parts.values()) == pytest.approx(prediction.communication_s)
    assert sum(len(part.collectives) for part in parts.values()) == len(prediction.collectives)


def test_modules_phases_and_the_optimizer_have_their_own(shares):
    _, parts = shares
    assert {phase for _, phase in parts} <= {"forward", "backward", "optimizer", ""}
    assert parts["0", "forward"].compute_s > 0
    assert parts["2", "backward"].compute_s > 0
    optimizer = [part for (_, phase), part in parts.items() if phase == "optimizer"]
    assert sum(part.compute_s for part in optimizer) > 0


def test_gradients_are_reduced_where_they_are_made(shares):
    _, parts = shares
    kinds = {each.kind for each in parts["2", "backward"].collectives}
    assert kinds & {"reduce-scatter", "all-reduce"}
