"""Train a small Llama under a plan as DTensors, in four processes, and hold it against one process.

    python examples/run_in_dtensor.py        # gloo on this machine's CPU; NCCL where there are four GPUs

The planning process captures the step with torch_xla; the others need only PyTorch and the plan's JSON.
"""

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import autoshard

BATCH, TOKENS, VOCABULARY, STEPS = 8, 32, 512, 3
MESH = autoshard.Mesh((2, 2), device="h100")


def build():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plan(file):
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    with torch.device("meta"):
        model = build()
    program = autoshard.capture(model, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer_of)
    # So small a model would not be split; a hint makes it.
    hints = {"input_ids": "[data],[]", **{f"model.layers.{i}.mlp.gate_proj.weight": "[model],[]" for i in (0, 1)}}
    found = autoshard.plan_program(program, MESH, hints=hints)
    print(found)
    found.save(file)


def train(file, rank, world, store):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = f"cuda:{rank}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cuda" if cuda else "cpu", MESH.shape, mesh_dim_names=MESH.axis_names)

    torch.manual_seed(0)
    model = build().to(device)
    alone = copy.deepcopy(model)
    optimizer, theirs = optimizer_of(model.parameters()), optimizer_of(alone.parameters())
    lowered = autoshard.Plan.load(file).to_dtensor(mesh)
    lowered.apply(model, optimizer)
    worst = 0.0
    for number in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = alone(input_ids=tokens, labels=tokens).loss
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        found, wanted = loss.detach().full_tensor().item(), wanted.item()
        worst = max(worst, abs(found - wanted) / wanted)
        if rank == 0:
            print(f"step {number}: loss {found:.6f} in {world} processes, {wanted:.6f} in one")
    if rank == 0:
        weight = model.model.layers[0].mlp.gate_proj.weight
        print(f"gate_proj of layer 0: {weight.placements}, {tuple(weight.to_local().shape)} of {tuple(weight.shape)}")
        print("not expressed by DTensor:", *lowered.inexpressible, sep="\n  ")
        print("transformers' tp_plan:", *lowered.hf_tp_plan(alone), sep="\n  ")
        print(f"losses differ by at most {worst:.1e}")
        assert worst < 1e-5
    dist.destroy_process_group()


def main():
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return
    with tempfile.TemporaryDirectory() as directory:
        file, store = Path(directory) / "plan.json", Path(directory) / "store"
        plan(file)
        sys.stdout.flush()
        command = [sys.executable, __file__, str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank), str(MESH.size), str(store)], env=environment)
            for rank in range(MESH.size)
        ]
        assert [each.wait() for each in ranks] == [0] * MESH.size


if __name__ == "__main__":
    main()
