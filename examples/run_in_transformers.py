"""A plan in transformers' own tensor parallelism: a small Llama in two processes (gloo), held against one process.

    python examples/run_in_transformers.py

`plan.to_tp_plan(model)` says the plan in the words of `tp_plan`, and what of it these words cannot say.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import autoshard

TOKENS, VOCABULARY, WORLD = 16, 128, 2


def build():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def plan(directory):
    tokens = torch.zeros(4, TOKENS, dtype=torch.int64)
    torch.manual_seed(0)
    model = build()
    # So small a model would not be split; hints make it: the weights, and what the modules return.
    hints = {"input_ids": "[],[]"}
    for name in (f"model.layers.{layer}.mlp.{name}" for layer in (0, 1) for name in ("gate_proj", "up_proj")):
        hints |= {f"{name}.weight": "[model],[]", name: "[],[],[model]"}
    found = autoshard.plan(
        model, {"input_ids": tokens, "labels": tokens}, mesh=(1, WORLD), device="h100",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        hints=hints,
    )  # fmt: skip
    styles, lost = found.to_tp_plan(model)
    print("tp_plan:", *(f"{name}: {style}" for name, style in styles.items()), sep="\n  ")
    print("what it does not say:", *lost, sep="\n  ")
    model.save_pretrained(directory / "model")
    (directory / "styles.json").write_text(json.dumps(styles))


def run(directory, rank):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    styles = json.loads((directory / "styles.json").read_text())
    load = transformers.AutoModelForCausalLM.from_pretrained
    alone = load(directory / "model", attn_implementation="eager")
    model = load(
        directory / "model", attn_implementation="eager",
        distributed_config=DistributedConfig(tp_plan=styles, tp_size=WORLD),
    )  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    found, wanted = (net(input_ids=tokens, labels=tokens).loss for net in (model, alone))
    found = found.full_tensor() if isinstance(found, DTensor) else found
    if rank == 0:
        weight = model.model.layers[0].mlp.up_proj.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        print(f"up_proj of layer 0: {tuple(local.shape)} of {tuple(alone.model.layers[0].mlp.up_proj.weight.shape)}")
        print(f"loss {found.item():.6f} in {WORLD} processes, {wanted.item():.6f} in one")
        assert local.shape[0] * WORLD == alone.model.layers[0].mlp.up_proj.weight.shape[0]
        assert abs(found.item() - wanted.item()) / wanted.item() < 1e-5
    dist.destroy_process_group()


def main():
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]), int(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as directory:
        plan(Path(directory))
        sys.stdout.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([sys.executable, __file__, directory, str(rank)], env=environment) for rank in range(WORLD)
        ]
        assert [each.wait() for each in ranks] == [0] * WORLD


if __name__ == "__main__":
    main()
