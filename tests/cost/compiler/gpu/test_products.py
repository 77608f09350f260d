"""Products that XLA's GPU compiler merges and splits, beside what it makes of them."""

import re

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import compile_module
from tests.cost.peaks import peak_and_compiled, squares

pytest.importorskip("jax_plugins.xla_cuda12")


class Gated(torch.nn.Module):
    """Two products of one operand, and a third: so are the gradients of their weights."""

    def __init__(self, width: int = 512, hidden: int = 1024) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Table(torch.nn.Module):
    """Products with a table as it is transposed, which it is back again for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = torch.nn.Linear(512, 128, bias=False)
        self.register_buffer("keys", torch.zeros(32768, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries(x) @ self.keys.t()


class Experts(torch.nn.Module):
    """Products of one operand with weights of two and of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(512, 8, bias=False)
        self.low = torch.nn.Parameter(torch.zeros(8, 64, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("bd,erd->ber", x, self.low) * self.router(x).softmax(-1)[..., None]).sum(1)


def test_products_read_what_is_transposed_for_them() -> None:
    """Two transposed copies of the table were predicted: the automatic plan, which split it, took 1.4 times as long."""
    peak, compiled = peak_and_compiled("h100:8", Table().bfloat16(), (torch.randn(1024, 512).bfloat16(),))
    assert peak == pytest.approx(compiled.memory.peak, rel=0.05)


@pytest.mark.parametrize(
    ("model", "shape"), [(Gated, (16, 1024, 512)), (Gated, (16, 1023, 512)), (Experts, (8192, 512))]
)
def test_products_of_one_operand_are_one_and_gradients_of_weights_are_split(
    model: type[torch.nn.Module], shape: tuple[int, ...]
) -> None:
    """1,023 positions, a row without its last token, are padded to the parts of a split contraction."""
    given = torch.randn(shape).bfloat16()
    program = autoshard.capture(
        model().bfloat16(), (given,), loss_fn=squares, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="h100")
    annotations = manual.PLANS["dp"](graph, mesh)
    compiled = compile_module(annotate(program, graph, annotations, mesh), "h100:8", donate=donated(program))
    found = predict(graph, annotations, mesh)
    products = [kernel for kernel in found.compiled.kernels if kernel.flops]
    assert len(products) == len(re.findall(r"%gemm_fusion_dot[.\d]* = ", compiled.hlo_text))
    split = [kernel for kernel in products if found.compiled.program.arrays[kernel.writes[0]].shape is None]
    assert len(split) == len(re.findall(r"%gemm_fusion_dot[.\d]* = f32\[\d+,\d+,\d+\]", compiled.hlo_text))
    assert found.peak_memory_bytes == pytest.approx(compiled.memory.peak, rel=0.05)
