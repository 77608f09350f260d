"""The command line without torch_xla: a plan made, lowered and verified through torchax."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

GPT2 = ["hf:gpt2", "--batch", "4", "--seq", "16", "--set", "n_layer=1", "--set", "n_embd=32", "--set", "n_head=2"]
GPT2 += ["--set", "vocab_size=64", "--set", "n_positions=32", "--train", "sgd"]


def autoshard(*arguments):
    return subprocess.run([sys.executable, "-m", "autoshard", *map(str, arguments)], capture_output=True, text=True)


def test_plan_then_verify(tmp_path):
    plan = tmp_path / "plan.json"
    made = autoshard("plan", *GPT2, "--mesh", "2x2", "--frontend", "torchax", "-o", plan, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(plan.read_text())["program"]["frontend"] == "torchax"
    verified = autoshard("verify", plan, *GPT2, "--target", "cpu", "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert json.loads(verified.stdout.splitlines()[-1])["passed"]
    refused = autoshard("verify", plan, *GPT2, "--target", "cpu", "--run")
    assert refused.returncode == 2
    assert "--run trains through" in refused.stderr


def test_autocast_of_the_device_that_it_is_planned_for():
    """Where torch_xla is not installed, what is written for CUDA is captured as it is meant; nothing stays on."""
    import torch

    import autoshard as package

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.layer(x)

    program = package.capture(Net(), torch.zeros(4, 8), frontend="torchax")
    assert program.outputs[0].type.dtype == "bf16"
    assert not torch.is_autocast_enabled("xla")
    with pytest.raises(RuntimeError, match=r"(meta|unsupported)"):
        torch.autocast("meta")


def test_a_concatenation_of_many_is_one_op():
    """jax writes a tree of concatenations of 16."""
    import torch

    import autoshard as package
    from autoshard.stablehlo.reader import build_graph

    class Net(torch.nn.Module):
        def forward(self, x):
            many = torch.stack([x * i for i in range(20)], 1).flatten(1)
            return torch.cat([many, *[x + i for i in range(18)], torch.cat([x, x * 2], 1)], 1)

    graph = build_graph(package.capture(Net(), torch.zeros(4, 8), frontend="torchax"))
    assert [len(op.operands) for op in graph.ops if op.kind == "concatenate"] == [20, 2, 20]
