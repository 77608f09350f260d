"""What a TPU program is given, beside what libtpu says it is."""

import pytest
import torch

import autoshard
from autoshard import manual
from autoshard.cost.predict import predict
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.compile import compile_module

pytest.importorskip("libtpu")


def test_buffers_of_windowed_einsums_are_no_arguments() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).bfloat16()
    program = autoshard.capture(
        model,
        (torch.randn(32768, 1024, dtype=torch.bfloat16),),
        loss_fn=lambda made: made.float().pow(2).mean(),
        optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
    )
    graph, mesh = build_graph(program), Mesh((2, 4), ("data", "model"), device="tpu-v5e")
    annotations = manual.PLANS["fsdp"](graph, mesh)
    found = predict(graph, annotations, mesh).compiled
    assert any(kernel.kind == "allocate" for kernel in found.kernels)
    module = annotate(program, graph, annotations, mesh)
    compiled = compile_module(module, "tpu-v5e:2x4", donate=donated(program))
    assert found.argument_bytes == pytest.approx(compiled.memory.argument, rel=0.001)
