"""What is kept of a graph: as long as the graph lives, and never for another one."""

from __future__ import annotations

import gc
import weakref

from autoshard.cost.partitioner.propagate import propagate
from autoshard.graph.annotations import Annotations
from autoshard.graph.memo import Latest, per_graph
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh
from autoshard.stablehlo.reader import build_graph
from tests.graph.helpers import program_from_text

TEXT = """
func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %y = stablehlo.tanh %x : tensor<8x4xf32>
  return %y : tensor<8x4xf32>
}
"""


def graph() -> Graph:
    return build_graph(program_from_text(TEXT))


def test_each_graph_has_its_own_and_takes_it_along() -> None:
    calls: list[int] = []

    @per_graph
    def length(graph: Graph) -> int:
        calls.append(1)
        return len(graph.ops)

    one, other = graph(), graph()
    assert [length(one), length(one), length(other), length(one)] == [len(one.ops)] * 4
    assert len(calls) == 2
    del one
    gc.collect()
    for _ in range(20):  # some of these are where the first one was
        length(graph())
    assert len(calls) == 22


def test_the_latest_is_made_again_for_another_graph_or_key_and_forgotten_with_its_graph() -> None:
    latest, one, other = Latest(), graph(), graph()
    asked = ((one, "a"), (one, "a"), (one, "b"), (other, "b"), (one, "b"))
    made = [latest.of(of, key, lambda: [1]) for of, key in asked]
    assert [made[0] is made[1], len({id(each) for each in made})] == [True, 4]
    del one, asked
    gc.collect()
    assert latest.result is None


def test_shardings_follow_the_annotations_whatever_was_asked_for_before() -> None:
    found = graph()
    mesh = Mesh((2, 4), ("data", "model"))
    (argument,) = found.arguments
    first = {Value(argument): (("data",), ())}
    other = {Value(argument): ((), ("model",))}
    (out,) = found.outputs
    for pins in (first, other, first):
        assert propagate(found, Annotations(pins, {}), mesh).specs[out] == pins[Value(argument)]
    wider = Mesh((4, 2), ("data", "model"))
    assert propagate(found, Annotations(first, {}), wider).subaxes.mesh == wider


def test_what_is_kept_of_a_propagation_does_not_keep_the_graph() -> None:
    found = graph()
    propagate(found, Annotations({}, {}), Mesh((2,), ("data",)))
    alive = weakref.ref(found)
    del found
    gc.collect()
    assert alive() is None
