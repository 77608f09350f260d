"""Which sorts XLA's GPU and TPU compilers turn into top-k calls, and what compilers gather for them."""

import pytest
import torch

import autoshard
from autoshard.cost.partitioner.top_k import top_k_sorts
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh, Spec
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import TargetError, on_target, parse_target


@pytest.mark.parametrize(
    ("sorts", "calls"),
    [
        (lambda x: x.topk(5, -1), 1),
        (lambda x: x.sort(-1, descending=True), 0),  # torch_xla writes a top-k of all
        (lambda x: x.argsort(-1), 0),
    ],
)
def test_a_sort_of_which_all_is_read_stays_a_sort(sorts, calls: int) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            return sorts(x)

    graph = build_graph(autoshard.capture(Net(), (torch.randn(16, 64),)))
    assert len(top_k_sorts(graph)) == calls


class Sparse(torch.nn.Module):
    """The largest of many features, which are split: as in a sparse autoencoder, or a vocabulary that is decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(64, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).topk(16, -1).values


DATA, MODEL = ("data",), ("model",)


@pytest.mark.parametrize("target", ["h100:8", "tpu-v5e:2x4"])
@pytest.mark.parametrize("spec", [(DATA, ()), (DATA + MODEL, ()), ((), MODEL), (DATA, MODEL), ((), DATA + MODEL)])
@pytest.mark.parametrize("kept", [True, False])
def test_the_largest_of_each_part_are_gathered(target: str, spec: Spec, kept: bool) -> None:
    """8 H100, Megatron: rows of 32,768 were gathered, 504 % of the bytes. Compilers do so where parts have replicas."""
    program = autoshard.capture(Sparse(), (torch.randn(512, 64),))
    graph, where = build_graph(program), parse_target(target, 8)
    mesh = on_target(Mesh((2, 4), ("data", "model"), device=target.partition(":")[0]), where)
    wide, values = graph.aten_outputs[0, 0], graph.aten_outputs[1, 0]
    pins = {**{Value(op): ((), ()) for op in graph.arguments}, wide: spec, **({values: (spec[0], ())} if kept else {})}
    text = annotate(program, graph, Annotations(pins), mesh, platform=where.family)
    try:
        report, _ = compare_compiled(graph, Annotations(pins), mesh, where, text)
    except TargetError as error:
        pytest.skip(str(error))
    assert report.fidelity.value == 0
