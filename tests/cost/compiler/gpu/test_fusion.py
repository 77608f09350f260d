"""What XLA's GPU compiler fuses."""

from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.mesh import Mesh
from tests.graph.helpers import graph_from_text

DEEP = 3000


def test_a_chain_is_followed_however_deep_it_is() -> None:
    """A sum of 5,000 small parameters, one behind the other, had ended in a RecursionError."""
    kind = "tensor<64x64xf32>"
    lines = [f"  %v0 = stablehlo.add %x, %x : {kind}"]
    lines += [f"  %v{i} = stablehlo.add %v{i - 1}, %x : {kind}" for i in range(1, DEEP)]
    last = f"%v{DEEP - 1}"
    text = (
        f"func.func @main(%x: {kind}) -> ({kind}, {kind}) {{\n"
        + "\n".join(lines)
        + f"\n  %a = stablehlo.transpose {last}, dims = [1, 0] : ({kind}) -> {kind}"
        + f"\n  %b = stablehlo.tanh {last} : {kind}\n  return %a, %b : {kind}, {kind}\n}}"
    )
    graph = graph_from_text(text)
    mesh = Mesh((2, 4), ("data", "model"), "h100")
    found = predict(graph, Annotations({}), mesh, load_device("h100"))
    assert found.step_time_s > 0
    assert not found.collectives
