"""Activations of few images on a TPU: what is copied around collectives and for the backward pass, and what follows."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from autoshard.cost.compiler.tpu.strips import (
    early_seconds,
)
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.planning import one_mesh
from autoshard.planning.candidate import Decision
from autoshard.planning.one_mesh import OneMesh, decide
from autoshard.plans.value import NoPlanError
from autoshard.solver.problem import Status
from autoshard.solver.settings import Settings
from autoshard.strategies.formulate import Formulation, formulate
from tests.graph.helpers import graph_from_text

BOTH = ("data", "model")
BATCH = (BOTH, (), (), ())
WHOLE = ((), (), (), ())


def mesh_of(device: str) -> Mesh:
    return Mesh((2, 4), BOTH, device=device)


def network(images: int, features: int = 256) -> Graph:
    """Three convolutions, and the gradient of the second's kernel: what it reads waits while the third runs."""
    image, kernel = f"tensor<{images}x{features}x16x16xf32>", f"tensor<{features}x{features}x1x1xf32>"
    window = "window = {stride = [1, 1]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}"

    def convolution(labels: str, operands: str, types: str) -> str:
        return f"stablehlo.convolution({operands}) dim_numbers = {labels}, {window} : {types}"

    forward, kinds = "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]", f"({image}, {kernel}) -> {image}"
    turned = f"tensor<1x1x{features}x{features}xf32>"
    return graph_from_text(
        f"""module {{ func.func public @main(%x: {image}, %u: {kernel}, %v: {kernel}, %w: {kernel}) -> {turned} {{
      %a = {convolution(forward, "%x, %u", kinds)}
      %n = stablehlo.negate %a : {image}
      %b = {convolution(forward, "%n, %v", kinds)}
      %c = {convolution(forward, "%b, %w", kinds)}
      %g = {convolution("[f, b, 0, 1]x[i, o, 0, 1]->[0, 1, b, f]", "%n, %c", f"({image}, {image}) -> {turned}")}
      return %g : {turned} }} }}""",
        roles=["input", *3 * ["parameter"]],
    )


def predicted(graph: Graph, device: str, last: tuple[tuple[str, ...], ...] = WHOLE) -> Prediction:
    """Images are split over all devices, the third kernel as `last` says."""
    pins = {Value(op): spec for op, spec in zip(graph.arguments, (BATCH, WHOLE, WHOLE, last), strict=True)}
    return predict(graph, Annotations(pins), mesh_of(device))


@pytest.mark.parametrize(
    ("device", "images", "split", "early"),
    [
        ("tpu-v5e", 32, True, True),  # a gather is in flight: copies for the gradient run beside it
        ("tpu-v5e", 32, False, False),  # nothing is
        ("tpu-v5p", 32, True, False),  # two cores copy where it is read
        ("tpu-v5e", 64, True, False),  # eight images fill a tile: no copies
    ],
)
def test_copies_for_the_backward_pass_are_asked_after(device: str, images: int, split: bool, early: bool) -> None:
    compiled = predicted(network(images), device, (BOTH, (), (), ()) if split else WHOLE).compiled
    assert bool(early_seconds(compiled, load_device(device))) == early


def test_activations_are_put_together_around_an_all_to_all() -> None:
    """Four images to a device are strips; eight fill a tile, and lie as an all-to-all moves them."""
    around = {}
    for images in (32, 64):
        graph = network(images)
        pins = {Value(op): spec for op, spec in zip(graph.arguments, (BATCH, WHOLE, WHOLE, WHOLE), strict=True)}
        first = next(op.id for op in graph.ops if op.kind == "convolution")
        moved = Annotations(pins | {Value(first): BATCH, Value(first + 1): ((), BOTH, (), ())})
        kinds = [kernel.kind for kernel in predict(graph, moved, mesh_of("tpu-v5p")).compiled.kernels]
        before, after = kinds[: kinds.index("all-to-all")], kinds[kinds.index("all-to-all") + 1 :]
        around[images] = before[-1] == "copy", after[0] == "copy"
    assert around == {32: (True, True), 64: (False, False)}


@pytest.mark.parametrize("none_is_faster", [True, False])
def test_gathers_that_bring_about_copies_must_be_worth_it(
    none_is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, mesh = network(32), mesh_of("tpu-v5e")
    decision = OneMesh(graph, mesh).candidate(None).decision
    whole = Annotations({Value(op): spec for op, spec in zip(graph.arguments, (BATCH, *3 * [WHOLE]), strict=True)})
    split = Annotations({Value(op): BATCH for op in graph.arguments})
    first = next(op.id for op in graph.ops if op.kind == "convolution")
    moved = Annotations(split.pins | {Value(first): BATCH, Value(first + 1): ((), BOTH, (), ())})
    asked: list[bool] = []
    chosen = {True: split, False: whole if none_is_faster else moved}
    made = {gathers: formulate(graph, mesh, load_device("tpu-v5e"), gathers=gathers) for gathers in chosen}
    monkeypatch.setattr(one_mesh, "formulated", lambda *arguments, gathers=True: made[gathers])
    monkeypatch.setattr(one_mesh, "REPRICED", 0)
    monkeypatch.setattr(one_mesh, "HIDDEN", 0.0)

    def decided(formulation: Formulation, *_: object) -> Decision:
        asked.append(formulation is made[True])
        return replace(decision, annotations=chosen[asked[-1]])

    monkeypatch.setattr(one_mesh, "decide", decided)
    assert OneMesh(graph, mesh).candidate(None).annotations == (whole if none_is_faster else split)
    assert asked == [True, False]

    # The copies count twice: a plan without them that is slower by less than they take is taken.
    gathered = predict(graph, split, mesh)
    early = early_seconds(gathered.compiled, load_device("tpu-v5e"))
    slower = replace(gathered, overlapped_s=gathered.overlapped_s + early / 2)
    chosen[False] = moved
    monkeypatch.setattr(
        one_mesh,
        "predict",
        lambda graph, annotations, mesh: slower if annotations == moved else predict(graph, annotations, mesh),
    )
    assert OneMesh(graph, mesh).candidate(None).annotations == moved

    def held(formulation: Formulation, *_: object) -> Decision:
        if formulation is made[False]:
            raise NoPlanError("a hint wants one")
        return decided(formulation)

    monkeypatch.setattr(one_mesh, "decide", held)
    assert OneMesh(graph, mesh).candidate(None).annotations == split


def test_a_plan_without_gathers_may_move_parts_otherwise() -> None:
    """ResNet on v5e 2x4: 2.48 ms with gathers, 2.12 data parallel, 2.03 with all-to-alls alone."""
    graph, mesh = network(32), mesh_of("tpu-v5e")
    images, kernel = (Value(op) for op in graph.arguments[:2])
    first = Value(next(op.id for op in graph.ops if op.kind == "convolution"))

    def chosen(gathers: bool, fixed: dict[Value, Spec]) -> Decision:
        formulation = formulate(graph, mesh, load_device("tpu-v5e"), gathers=gathers)
        return decide(formulation.fixed({first: BATCH, **fixed}), mesh, Settings(time.process_time() + 60.0))

    columns = ((), BOTH, (), ())
    moved = chosen(False, {images: columns})  # from channels to images, all to all
    assert moved.solution.objective == pytest.approx(chosen(True, {images: columns}).solution.objective)
    assert chosen(True, {kernel: columns}).solution.status is Status.OPTIMAL
    with pytest.raises(NoPlanError):  # a kernel that is split has to be gathered for images that are
        chosen(False, {kernel: columns})


def test_an_input_of_which_parts_are_read_is_split() -> None:
    """A whole one is copied on chip whole, and gives every device all images."""
    graph = network(64)
    chosen = OneMesh(graph, mesh_of("tpu-v5e")).candidate(None).annotations
    assert chosen.pins[Value(graph.arguments[0])][0]
