"""A step under PyTorch's eager runtime: its kernels, what it gathers, sums and keeps."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("torch_xla")

import torch
from torch import nn
from torch.nn import functional

import autoshard
from autoshard import Eager
from autoshard.cost.compiler.lowered import COLLECTIVES
from autoshard.cost.predict import Prediction, predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.groups import BARRIER
from autoshard.manual import PLANS
from autoshard.mesh import Mesh
from autoshard.stablehlo.reader import build_graph

ONE, EIGHT = Mesh((1,), ("data",), "h100:1"), Mesh((8,), ("data",), "h100:8")
ROWS, WIDTH = 4096, 1024
RECOMPUTED = (("0", "all"), ("1", "all"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Attention(nn.Module):
    def forward(self, x):
        heads = x.unflatten(-1, (-1, 128)).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def forward(module, *sample):
    return build_graph(autoshard.capture(module, sample, device="h100"))


@cache
def trained(remat=()):
    """Two blocks under autocast with SGD."""
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    model.forward = torch.autocast("xla", dtype=torch.bfloat16)(model.forward)
    return build_graph(
        autoshard.capture(
            model,
            (torch.zeros(ROWS, WIDTH, device="meta"),),
            loss_fn=lambda out: out.float().square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            device="h100",
            remat=dict(remat) or None,
        )
    )


def fsdp(eager: Eager | None, remat=()) -> Prediction:
    return predict(trained(remat), PLANS["fsdp"](trained(remat), EIGHT), EIGHT, eager=eager)


def kernels(found: Prediction) -> list[list[str]]:
    """Kinds of the steps of each kernel."""
    steps = found.compiled.program.steps
    return [[steps[number].kind for number in kernel.steps] for kernel in found.compiled.kernels]


def test_a_block_is_one_kernel_per_module_and_one_for_the_sum():
    with torch.device("meta"):
        graph = forward(Block(), torch.zeros(ROWS, WIDTH))
    found = kernels(predict(graph, Annotations(), ONE, eager=Eager()))
    norm, up, act, down, total = found
    assert "rsqrt" in norm
    assert "erf" in act
    assert total == ["add"]
    for product in (up, down):
        assert product[0] == "dot_general"
        assert product[-1] == "add"


def test_views_are_no_kernels():
    with torch.device("meta"):
        graph = forward(Attention(), torch.zeros(2, 512, WIDTH, dtype=torch.bfloat16))
    assert [kinds[-1] for kinds in kernels(predict(graph, Annotations(), ONE, eager=Eager()))] == ["attention"]


def test_every_elementwise_op_reads_and_writes_memory():
    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(4):
                x = x.tanh() * x
            return x

    graph = forward(Chain(), torch.zeros(ROWS, WIDTH, device="meta"))
    size = 4 * ROWS * WIDTH
    apart, fused = (predict(graph, Annotations(), ONE, eager=each).compiled for each in (Eager(), None))
    assert fused.moved_bytes == 2 * size
    assert apart.moved_bytes == 4 * (2 + 3) * size


def test_a_norms_gradient_computes_again_what_it_needs():
    found = fsdp(Eager()).compiled
    steps, arrays = found.program.steps, found.program.arrays
    norms = [kernel for kernel in found.kernels if any(steps[number].kind == "rsqrt" for number in kernel.steps)]
    assert len(norms) == 4  # of two modules, in both directions
    for kernel in norms[:2]:
        assert [arrays[array].dtype for array in kernel.writes] == ["f32"]  # no statistics, nothing normalised


def test_parameters_are_gathered_once_more_for_the_backward_pass():
    once, twice = fsdp(Eager(gathers_again=False)), fsdp(Eager())
    count = [sum(each.kind == "all-gather" for each in found.collectives) for found in (once, twice)]
    assert count[1] - count[0] == 2 * 2 + 1  # the products' weights, and one norm's: none reads the first's gradient
    assert twice.communication_s > once.communication_s
    assert twice.compute_s == pytest.approx(once.compute_s, rel=1e-3)  # casts of what is gathered


def test_a_pass_that_computes_again_reads_what_is_gathered_ahead():
    kept, again = (fsdp(Eager(gathers_again=False), remat) for remat in ((), RECOMPUTED))
    gathers = [sum(each.kind == "all-gather" for each in found.collectives) for found in (kept, again)]
    assert gathers[0] == gathers[1]
    assert again.communication_s == pytest.approx(kept.communication_s)
    assert again.compute_s > kept.compute_s
    assert again.overlapped_s < kept.overlapped_s + 1.1 * (again.compute_s - kept.compute_s)


def test_gradients_are_summed_in_the_dtype_of_their_parameters():
    apart, fused = fsdp(Eager()), fsdp(None)
    summed = [
        sum(each.bytes for each in found.collectives if each.kind == "reduce-scatter") for found in (apart, fused)
    ]
    assert summed[0] > 1.9 * summed[1]


def test_gathers_and_sums_run_beside_kernels():
    found = fsdp(Eager())
    assert max(found.compute_s, found.communication_s) <= found.overlapped_s < found.step_time_s


def test_collectives_between_products_run_alone():
    mesh = Mesh((8,), ("model",), "h100:8")
    found = predict(trained(), PLANS["megatron"](trained(), mesh), mesh, eager=Eager())
    assert found.communication_s > 0
    assert found.overlapped_s > found.compute_s


def test_kernels_run_in_the_order_of_aten_ops():
    compiled = fsdp(Eager()).compiled
    made = {array for array, each in enumerate(compiled.program.arrays) if each.maker < 0}
    for kernel in compiled.kernels:
        assert made.issuperset(kernel.reads)
        made.update(kernel.writes)
    atens = [
        compiled.program.graph.ops[compiled.program.steps[kernel.steps[-1]].op].aten
        for kernel in compiled.kernels
        if kernel.kind not in COLLECTIVES | {BARRIER}
    ]
    assert atens[-1] == max(each for each in atens if each is not None)


def test_any_plan_is_evaluated_under_pytorch():
    program = trained().program
    plan = autoshard.manual_plan("fsdp", program, EIGHT)
    eager, compiled = (autoshard.evaluate(program, plan, eager=runtime) for runtime in (Eager(), None))
    assert eager.step_time_s == fsdp(Eager()).step_time_s > compiled.step_time_s


def test_the_eager_runtime_is_one_of_gpus():
    mesh = Mesh((8,), ("data",), "tpu-v5e:2x4")
    with pytest.raises(ValueError, match="not for tpu-v5e"):
        predict(trained(), Annotations(), mesh, eager=Eager())
