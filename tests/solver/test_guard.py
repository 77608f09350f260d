"""Convolutions that XLA would sum over idle devices too are read whole in space."""

import dataclasses

import pytest

from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh
from autoshard.solver.guard import WrongNumbersError, guarded, overcounted
from tests.cost.zoo import WINDOWS, program

MESH = Mesh((2, 4), ("data", "model"))
WHOLE, IN_SPACE = ((), (), (), ()), ((), (), ("data",), ())


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [  # each compiles to numbers that are four times too large
        ("conv", IN_SPACE, (("model",), (), (), ())),
        ("conv_weight", IN_SPACE, IN_SPACE),
    ],
)
def test_a_sum_over_idle_devices_is_found_and_avoided(name, first, second):
    _, graph = program([name], WINDOWS)
    annotations = Annotations({Value(0): first, Value(1): second})
    assert list(overcounted(graph, annotations, MESH).values()) == [(first, second)]
    safe = guarded(graph, annotations, MESH)
    assert overcounted(graph, safe, MESH) == {}
    assert safe.pins == annotations.pins
    assert safe.copies[Value(0), 0] == WHOLE


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("conv", (("model",), (), ("data",), ()), WHOLE),
        ("conv_weight", (("model",), (), ("data",), ()), (("model",), (), ("data",), ())),
        ("sum", ((), ()), ((), ())),
    ],
)
def test_what_is_right_is_left_alone(name, first, second):
    _, graph = program([name], WINDOWS) if name in WINDOWS else program([name])
    annotations = Annotations({Value(0): first, Value(1): second})
    assert guarded(graph, annotations, MESH) == annotations


def test_numbers_that_stay_wrong_are_refused_with_the_op():
    _, graph = program(["conv"], WINDOWS)
    graph = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, aten=None) for op in graph.ops))
    annotations = Annotations({Value(0): IN_SPACE, Value(1): (("model",), (), (), ())})
    with pytest.raises(WrongNumbersError, match=r"convolution op \d+ in conv over devices that hold the same part"):
        guarded(graph, annotations, MESH)
