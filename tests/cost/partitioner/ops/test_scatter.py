"""Which all-reduces are reduce-scatters: on paper, and held against compilers."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.partitioner.cuts import Cuts
from autoshard.cost.partitioner.partition import partition
from autoshard.cost.partitioner.propagate import propagate
from autoshard.cost.partitioner.tiling import Subaxes
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph, Value
from autoshard.mesh import Mesh, Spec
from autoshard.program import AtenOp, TensorType
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import compile_module
from autoshard.verify.targets import TargetError, parse_target
from tests.cost.few_ops import compiled_for, f32
from tests.graph.helpers import graph_from_text

MESH = Mesh((2, 4), ("data", "model"))
SUBAXES = Subaxes(MESH)
DATA, MODEL = SUBAXES.of_axis["data"], SUBAXES.of_axis["model"]
WHOLE: Spec = ((), ())


def scatters(axes, source, target, family):
    cuts = Cuts(SUBAXES, family)
    return cuts.scatters(axes, cuts.cut((64, 64), source, target))


def test_a_sum_that_is_then_split_along_its_axes_is_scattered():
    for family in ("cpu", "gpu", "tpu"):
        assert scatters(MODEL, ((), ()), (MODEL, ()), family)
        assert scatters((*DATA, *MODEL), ((), ()), ((*DATA, *MODEL), ()), family)
        assert not scatters(DATA, ((), ()), (MODEL, ()), family)


def test_only_the_cpu_counts_a_sum_that_is_split_along_two_dims_or_finer_or_in_another_order():
    both = (*DATA, *MODEL)
    for axes, after in ((both, (DATA, MODEL)), (DATA, (both, ())), (both, ((*MODEL, *DATA), ()))):
        assert scatters(axes, ((), ()), after, "cpu")
        assert not scatters(axes, ((), ()), after, "gpu")


def test_a_slice_in_front_of_an_all_to_all_counts():
    # Rows split along data move to columns: the idle axis is sliced along first.
    assert scatters(MODEL, (DATA, ()), ((), (*DATA, *MODEL)), "gpu")


tilings = st.permutations([*DATA, *MODEL]).flatmap(
    lambda axes: st.integers(0, len(axes)).flatmap(
        lambda n: st.integers(0, n).map(lambda m: (tuple(axes[:m]), tuple(axes[m:n])))
    )
)


@given(tilings, tilings, st.sampled_from([DATA, MODEL, (*DATA, *MODEL)]))
def test_what_a_gpu_scatters_the_cpu_counts_too(source, target, axes):
    if scatters(axes, source, target, "gpu"):
        assert scatters(axes, source, target, "cpu")


# --- held against compilers ---------------------------------------------------------------------------------------

TARGETS: list[Spec] = [
    (("model",), ()),
    ((), ("model",)),
    (("model", "data"), ()),
    (("data",), ("model",)),
    ((), ("data", "model")),
    (("data", "model"), ()),
    (("data",), ()),
]
CASES: list[tuple[tuple[str, ...], Spec, Spec]] = [
    *((("model",), source, target) for source in (WHOLE, (("data",), ())) for target in TARGETS),
    *(
        ((*summed,), WHOLE, target)
        for summed in itertools.permutations(("data", "model"))
        for target in TARGETS
        if len({axis for dim in target for axis in dim}) == 2
    ),
]
"""How the summed dim, the product and the exponential are split."""


def products() -> Graph:
    """One product per case, each of its own arguments, followed by an exponential."""
    count = len(CASES)
    kind = "tensor<64x64xf32>"
    arguments = ", ".join(f"%a{i}: {kind}, %b{i}: {kind}" for i in range(count))
    lines = []
    for i in range(count):
        lines.append(
            f"%r{2 * i} = stablehlo.dot_general %a{i}, %b{i}, contracting_dims = [1] x [0] : "
            f'({kind}, {kind}) -> {kind} loc("op{2 * i}")'
        )
        lines.append(marked(f"%m{2 * i}", 2 * i))
        lines.append(f'%r{2 * i + 1} = stablehlo.exponential %m{2 * i} : {kind} loc("op{2 * i + 1}")')
        lines.append(marked(f"%m{2 * i + 1}", 2 * i + 1))
    results = ", ".join(f"%m{2 * i + 1}" for i in range(count))
    kinds = ", ".join([kind] * count)
    text = f"module {{ func.func public @main({arguments}) -> ({kinds}) {{\n" + "\n".join(lines)
    text += f"\nreturn {results} : {kinds} }} }}"
    ops = [AtenOp(k, ("mm", "exp")[k % 2], "", "forward", (TensorType((64, 64), "f32"),)) for k in range(2 * count)]
    return graph_from_text(text, ops=ops)


def marked(name: str, k: int) -> str:
    call = f'stablehlo.custom_call @Sharding(%r{k}) {{mhlo.sharding = "{{replicated}}"}}'
    return f'{name} = {call} : (tensor<64x64xf32>) -> tensor<64x64xf32> loc("op{k}.out0")'


@pytest.mark.parametrize(("family", "target"), [("cpu", "cpu:8"), ("gpu", "h100:8")])
def test_sums_that_are_split_further_compile_to_what_is_predicted(family, target):
    try:
        parse_target(target, 8).packages()
    except TargetError as error:
        pytest.skip(str(error))
    graph = products()
    pins = {}
    for i, (summed, source, after) in enumerate(CASES):
        pins[Value(graph.arguments[2 * i])] = (source[0], summed)
        pins[Value(graph.arguments[2 * i + 1])] = (summed, ())
        pins[graph.aten_outputs[2 * i, 0]] = source
        pins[graph.aten_outputs[2 * i + 1, 0]] = after
    wanted = Annotations(
        pins,
        {(graph.aten_outputs[2 * i, 0], 2 * i + 1): pins[graph.aten_outputs[2 * i + 1, 0]] for i in range(len(CASES))},
    )
    compiled = compile_module(annotate(graph.program, graph, wanted, MESH), target)
    found = normalise(compiled_collectives(compiled.hlo_text, MESH, family))
    said = {}
    for one in partition(graph, propagate(graph, wanted, MESH), family).collectives:
        said[one.kind, one.axes] = said.get((one.kind, one.axes), 0) + one.bytes * one.count
    assert said == found


@pytest.mark.parametrize(
    ("target", "turned", "kind"),
    [
        ("cpu:8", False, "reduce-scatter"),
        ("h100:8", True, "all-reduce"),
        ("tpu-v5e:2x4", True, "reduce-scatter"),
        ("tpu-v5e:2x4", False, "all-reduce"),
    ],
)
def test_a_sum_of_which_a_dim_is_cut_that_it_has_merged(target, turned, kind):
    # Attention with the sequence first (nn.MultiheadAttention): the batch is the second of two dims that are one row.
    try:
        parse_target(target, 8).packages()
    except TargetError as error:
        pytest.skip(str(error))

    def heads(x, w, z):
        made = (x @ w).reshape(z.shape) if not turned else (x @ w).reshape(64, 16, 4, 64)
        return jnp.einsum("bhsd,bhtd->bhst", made.transpose(1, 2, 0, 3), z) if turned else made * z

    both, last = ("data", "model"), f32(16, 4, 64, 64) if turned else f32(64, 16, 256)
    after = (both, (), (), ()) if turned else ((), both, ())
    arguments = [f32(1024, 256), f32(256, 256), last]
    report, _ = compiled_for(target, heads, arguments, [((), both), (both, ()), after])
    assert report.fidelity.value == 0
    assert {one.kind for one in report.prediction.collectives} == {kind}


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "tpu-v5p:2x2x2"])
def test_what_a_sum_makes_may_go_round_a_ring(target):
    """A norm's scale, split by FSDP, before the head: what is summed to the devices' scales ends in permutes."""
    pytest.importorskip("libtpu")

    def head(scale, rows, words):
        return (jnp.tanh(rows) * scale) @ words.T

    both = ("data", "model")
    arguments = [f32(512), f32(8, 512, 512), f32(32128, 512)]
    report, _ = compiled_for(target, head, arguments, [(both,), (both, (), ()), (both, ())])
    assert report.fidelity.value == 0
    assert {one.kind for one in report.prediction.collectives} == {"all-reduce", "collective-permute"}
