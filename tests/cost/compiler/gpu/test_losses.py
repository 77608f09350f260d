"""What losses store on GPUs, against XLA's GPU compiler."""

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import compile_module

pytest.importorskip("jax_plugins.xla_cuda12")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_centred_logits_are_computed_in_each_kernel_that_reads_them(smoothing: float) -> None:
    """Smoothed labels make a fourth kernel of them; logits of bf16 less a maximum read as much as they return."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(256, 32768, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.head(x).float(), labels, label_smoothing=smoothing)

    inputs = (torch.randn(4096, 256, dtype=torch.bfloat16), torch.randint(0, 32768, (4096,)))
    program = autoshard.capture(
        Net().bfloat16(), inputs, loss_fn=lambda loss: loss, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="h100")
    annotations = manual.PLANS["dp"](graph, mesh)
    module = annotate(program, graph, annotations, mesh)
    compiled = compile_module(module, "h100:8", donate=donated(program))
    assert predict(graph, annotations, mesh).peak_memory_bytes == pytest.approx(compiled.memory.peak, rel=0.05)


def test_costly_ops_before_a_softmax_are_stored_in_f32() -> None:
    """Soft-capped logits: the sums of rows and their gradient read one tanh."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(256, 4096, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = torch.tanh(self.head(x) / 30) * 30
            return torch.nn.functional.cross_entropy(logits.float(), labels)

    inputs = (torch.randn(8192, 256, dtype=torch.bfloat16), torch.randint(0, 4096, (8192,)))
    program = autoshard.capture(
        Net().bfloat16(), inputs, loss_fn=lambda loss: loss, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="h100")
    annotations = manual.PLANS["dp"](graph, mesh)
    compiled = compile_module(annotate(program, graph, annotations, mesh), "h100:8", donate=donated(program))
    assert "f32[1024,4096]" in compiled.hlo_text[compiled.hlo_text.index("\nENTRY") :]
    assert predict(graph, annotations, mesh).peak_memory_bytes == pytest.approx(compiled.memory.peak, rel=0.05)


def test_a_softmax_holds_no_concatenation_and_no_slice() -> None:
    """Attention sinks (GPT-OSS): one more logit a row, whose probability is left out."""

    class Sinks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(8))
            self.query, self.key, self.value = (torch.nn.Linear(512, 512, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (
                project(x).unflatten(-1, (8, 64)).transpose(1, 2) for project in (self.query, self.key, self.value)
            )
            scores = query @ key.transpose(2, 3) * 0.125
            sinks = self.sinks.view(1, 8, 1, 1).expand(len(x), -1, x.shape[1], 1)
            logits = torch.cat([scores, sinks], -1)
            shares = torch.softmax((logits - logits.amax(-1, keepdim=True)).float(), -1)[..., :-1].to(x.dtype)
            return shares @ value

    program = autoshard.capture(
        Sinks().bfloat16(),
        (torch.randn(16, 1024, 512, dtype=torch.bfloat16),),
        loss_fn=lambda made: made.float().pow(2).mean(),
        optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="h100")
    annotations = manual.PLANS["dp"](graph, mesh)
    compiled = compile_module(annotate(program, graph, annotations, mesh), "h100:8", donate=donated(program))
    peak = predict(graph, annotations, mesh).peak_memory_bytes
    assert peak == pytest.approx(compiled.memory.peak, rel=0.15)  # a pad in f32 is stored in bf16
