"""One of the processes of `tests/lower/test_tp_plan.py`: loads a model as transformers shards it, and compares.

    python -m tests.lower.tp_plan_processes DIRECTORY RANK WORLD

The directory has `model/`, a saved model, and `styles.json`, name -> `tp_plan`; what was seen goes to `seen.json`.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max())


def main():
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    directory, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    alone = AutoModelForCausalLM.from_pretrained(directory / "model", attn_implementation="eager")
    tokens = torch.randint(0, alone.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    wanted = alone(input_ids=tokens, labels=tokens)
    wanted.loss.backward()
    seen = {}
    for name, styles in json.loads((directory / "styles.json").read_text()).items():
        model = AutoModelForCausalLM.from_pretrained(
            directory / "model", attn_implementation="eager",
            distributed_config=DistributedConfig(tp_plan=styles, tp_size=world),
        )  # fmt: skip
        found = model(input_ids=tokens, labels=tokens)
        found.loss.backward()
        gradients = {
            key: difference(whole(a.grad), b.grad)
            for (key, a), b in zip(model.named_parameters(), alone.parameters(), strict=True)
        }
        seen[name] = {
            "logits": difference(whole(found.logits), wanted.logits),
            "gradients": max(gradients.values()),
            "local": {
                key: list(each.to_local().shape) if isinstance(each, DTensor) else list(each.shape)
                for key, each in model.named_parameters()
            },
        }
    if rank == 0:
        (directory / "seen.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
