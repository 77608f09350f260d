"""What the latency hiding scheduler of XLA's GPU compiler goes by, as its log says for jax 0.10.2, and what follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autoshard.api import capture
from autoshard.cost.compiler.gpu.backend import _bitcasts
from autoshard.cost.compiler.gpu.estimates import kernel_seconds
from autoshard.cost.compiler.gpu.sums import Sums
from autoshard.cost.compiler.kernels import Kernel
from autoshard.cost.compiler.lowered import COLLECTIVES, Lowered
from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.manual import PLANS
from autoshard.mesh import Mesh, Spec
from autoshard.stablehlo.annotate import annotate
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target
from tests.cost.few_ops import bf16, compiled_for
from tests.graph.helpers import graph_of


def scheduled(
    target: str, mesh: Mesh, function: object, arguments: list[object], specs: list[Spec]
) -> tuple[tuple[Kernel, ...], Lowered]:
    """The kernels of a function before they are scheduled."""
    graph = graph_of(function, *arguments)
    annotations = Annotations({Value(op): spec for op, spec in zip(graph.arguments, specs, strict=True)})
    found = predict(graph, annotations, mesh, load_device(target)).compiled
    return found.unscheduled, found.program


def seconds(target: str, kernels: tuple[Kernel, ...], program: Lowered, collective: bool) -> list[float]:
    device, sums = load_device(target), Sums(program)
    return [
        kernel_seconds(kernel, program, device, sums)
        for kernel in kernels
        if (kernel.kind in COLLECTIVES) == collective
    ]


@pytest.mark.parametrize(
    ("target", "dtype", "sizes", "microseconds"),
    [
        ("h100:8", jnp.bfloat16, (16384, 4096, 14336), 2466.2),
        ("h100:8", jnp.bfloat16, (4096, 4096, 4096), 176.2),
        ("h100:8", jnp.float32, (8192, 8192, 8192), 2727.3),
        ("h100:8", jnp.float32, (1024, 16384, 4096), 421.8),
        ("h100:8", jnp.float32, (2048, 2048, 2048), 50.1),
        ("h100:8", jnp.bfloat16, (65536, 1024, 4096), 802.3),
        ("h200:8", jnp.bfloat16, (16384, 4096, 14336), 2466.2),
    ],
)
def test_products_last_as_long_as_the_scheduler_takes_them_to(target, dtype, sizes, microseconds) -> None:
    m, k, n = sizes
    arguments = [jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)]
    kernels, program = scheduled(target, Mesh((8,), ("a",)), lambda x, w: x @ w, arguments, [((), ()), ((), ())])
    assert seconds(target, kernels, program, False) == [pytest.approx(microseconds * 1e-6, rel=0.15)]


@pytest.mark.parametrize(
    ("target", "shape", "axes", "microseconds"),
    [
        ("h100:2x8", (2, 2, 4), ("b", "c"), 729.3),  # within a host
        ("h100:2x8", (2, 2, 4), ("c",), 666.3),
        ("h100:2x8", (2, 2, 4), ("a", "b", "c"), 1673.0),
        ("h100:2x8", (2, 2, 4), ("a", "c"), 3273.8),
        ("h100:2x8", (2, 2, 4), ("a", "b"), 5356.5),
        ("h100:2x8", (2, 2, 4), ("a",), 5970.8),
        ("h100:4x8", (4, 2, 4), ("a", "b", "c"), 1782.0),
        ("h100:4x8", (4, 2, 4), ("a", "c"), 3571.3),
        ("h100:4x8", (4, 2, 4), ("a", "b"), 5846.4),
        ("h100:4x8", (4, 2, 4), ("a",), 8900.1),
        ("h200:2x8", (2, 2, 4), ("a", "b", "c"), 957.2),
        ("h200:2x8", (2, 2, 4), ("a",), 3159.2),
    ],
)
def test_gathers_last_as_long_as_the_scheduler_takes_them_to(target, shape, axes, microseconds) -> None:
    """268 MB gathered, for a product of a batch over all devices."""
    names = ("a", "b", "c")
    arguments = [bf16(65536, 8192), bf16(8192, 16384)]
    mesh = Mesh(shape, names, device=target)
    kernels, program = scheduled(target, mesh, lambda x, w: x @ w, arguments, [(names, ()), (axes, ())])
    assert seconds(target, kernels, program, True) == [pytest.approx(microseconds * 1e-6, rel=0.12)]


def test_a_left_operand_all_of_whose_rows_are_contracted_has_a_bitcast_of_its_own() -> None:
    """Gradients of weights: with it they make more ready than gradients of inputs beside them, and go first."""

    def gradients(x: jax.Array, y: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.einsum("bsi,bso->io", x, y), jnp.einsum("bso,io->bsi", y, w)

    arguments = [bf16(8, 1024, 512), bf16(8, 1024, 2048), bf16(512, 2048)]
    specs: list[Spec] = [((), (), ()), ((), (), ()), ((), ())]
    kernels, program = scheduled("h100:8", Mesh((8,), ("a",)), gradients, arguments, specs)
    products = [kernel for kernel in kernels if kernel.flops]
    assert [tuple(_bitcasts(kernel, program).values()) for kernel in products] == [(True, False), (False,)]


def block(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, scale: jax.Array) -> jax.Array:
    """An RMS norm and a gated feed-forward layer, as of Llama."""
    wide = x.astype(jnp.float32)
    normal = (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale
    return x + (jax.nn.silu(normal @ gate) * (normal @ up)) @ down


def step(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
        y = x
        for number in range(0, len(weights), 4):
            y = jax.checkpoint(block)(y, *weights[number : number + 4])
        return jnp.square(y.astype(jnp.float32)).sum()

    return tuple(w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True))


@pytest.mark.parametrize("target", ["h100:8", "h100:2x4"])
def test_memory_of_gated_layers_under_fsdp_is_as_compiled(target: str) -> None:
    """Gradients of weights are computed late, with all that they read; nothing merges for a product's result alone."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    every = ("data", "model")
    arguments = [bf16(64, 2048, 2048), *[bf16(2048, 8192), bf16(2048, 8192), bf16(8192, 2048), bf16(2048)] * 3]
    specs: list[Spec] = [(every, (), ()), *[(every, ()), (every, ()), (every, ()), (every,)] * 3]
    report, _ = compiled_for(target, step, arguments, specs)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.03)


class Normed(torch.nn.Module):
    """A layer norm and a feed-forward layer, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(1024)
        self.up, self.down = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def test_a_layer_norm_is_one_kernel_that_is_run_again_for_what_reads_centred_rows() -> None:
    """GPT-2 1.5B was predicted to hold 39 % too little: statistics and centred rows were taken to be kept."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*(Normed() for _ in range(6))).bfloat16(), torch.empty(64, 1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(model, x.bfloat16(), loss_fn=lambda y: y.square().mean(), optimizer=optimizer)
    graph = build_graph(program)
    mesh, target = Mesh((8,), ("data",), device="h100:8"), parse_target("h100:8")
    annotations = PLANS["fsdp"](graph, mesh)
    module = annotate(graph.program, graph, annotations, mesh)
    report, _ = compare_compiled(graph, annotations, mesh, target, module)
    assert report.prediction.peak_memory_bytes == pytest.approx(report.memory_bytes, rel=0.05)
