"""One of the processes of `test_dtensor.py`: trains under a plan as DTensors, and alone, and compares.

    python -m tests.lower.dtensor.dtensor_processes DIRECTORY RANK WORLD

The directory has `NAME.json`, a plan for each scenario; what was seen goes to `seen.json` there.
"""

import contextlib
import copy
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from autoshard.api import Plan
from autoshard.errors import LoweringError
from tests.lower.dtensor.dtensor_ops import differences, written
from tests.lower.optimizers import masters

STEPS, ROWS, VOCABULARY, TOKENS = 3, 8, 96, 16


class Block(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Tokens to logits; the embedding and the head are one weight."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cast(Net):
    def forward(self, tokens):
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            return super().forward(tokens)


class Convolutional(torch.nn.Module):
    """Tokens to logits by convolutions over time, with and without bias and groups, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.wide = torch.nn.Conv1d(32, 64, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(64)
        self.grouped = torch.nn.Conv1d(64, 64, 5, padding=2, groups=4, bias=False)
        self.narrow = torch.nn.Conv1d(64, 32, 3, padding=1, bias=False)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        x = torch.nn.functional.gelu(self.norm(self.wide(x)))
        return self.head(self.narrow(self.grouped(x)).transpose(1, 2))


class Attentive(torch.nn.Module):
    """Tokens to logits by torch's attention, of itself (packed weights) and of another value, and its encoder layer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.own = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.cross = torch.nn.MultiheadAttention(32, 4, batch_first=True, kdim=16, vdim=16)
        self.narrow = torch.nn.Linear(32, 16)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)  # time first
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.own(x, x, x, need_weights=False)[0]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        memory = self.narrow(x)
        x = x + self.cross(x, memory, memory, attn_mask=mask)[0]
        return self.head(self.layer(x.transpose(0, 1)).transpose(0, 1))


class Recurrent(torch.nn.Module):
    """Tokens to logits by recurrent modules: of both directions, and time first with a first state."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.both = torch.nn.LSTM(32, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.later = torch.nn.RNN(32, 32)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x, (hidden, _) = self.both(self.embed(tokens))
        first = torch.cat((hidden[2], hidden[3]), -1).unsqueeze(0)
        return self.head(self.later(x.transpose(0, 1), first)[0].transpose(0, 1))


class Packed(torch.nn.Module):
    """Attention whose queries, keys and values are taken apart by unpacking, and whose first token is selected."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.packed = torch.nn.Linear(32, 96)
        self.norm = torch.nn.LayerNorm(32)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        rows, length = tokens.shape
        q, k, v = self.packed(x).view(rows, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + attended + x[:, 0].unsqueeze(1))


class Interleaved(torch.nn.Module):
    """A gate and what it lets through, whose features alternate in one projection (GPT-OSS)."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.both = torch.nn.Linear(32, 128)
        self.down = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        both = self.both(x)
        return self.head(x + self.down(both[..., ::2] * torch.sigmoid(both[..., 1::2])))


class Masked(torch.nn.Module):
    """Attention that reads the residual as it is, under a mask of each row's own; then sums over rows."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.projections = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in ("q", "k", "v", "o")}) for _ in range(2)
        )
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        there = (tokens % 3 > 0) | (torch.arange(TOKENS, device=tokens.device) == 0)
        mask = there[:, None, None, :].expand(-1, 1, TOKENS, -1)
        for layer in self.projections:
            q, k, v = (layer[name](x).unflatten(-1, (4, 8)).transpose(1, 2) for name in ("q", "k", "v"))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + layer["o"](attended.transpose(1, 2).flatten(2))
        return self.head(x / (x.square().sum(0).sqrt() + 1.0))


class Written(torch.nn.Module):
    """Writes into a sum whose parts lie on several processes."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.inner = torch.nn.ModuleDict({"scale": Scale()})
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.inner["scale"](self.embed(tokens)))


class Scale(torch.nn.Module):
    def forward(self, x):
        return x + x.sum(0).add_(1.0)


def loss_of(logits, target):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def loss_of_some(logits, target):
    ignored = target.masked_fill(target < VOCABULARY // 2, -100)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten())


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=TOKENS, vocab_size=VOCABULARY, use_cache=False,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def llama():
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def batch():
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    return {"tokens": tokens, "target": tokens.clone()}


def hf_batch():
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


SCENARIOS = {
    "megatron": (Net, batch, loss_of, sgd),
    "fsdp": (Net, batch, loss_of, sgd),
    "automatic": (Net, batch, loss_of, adamw),
    "masters": (Net, batch, loss_of, masters),
    "gpt2": (gpt2, hf_batch, None, sgd),
    "llama": (llama, hf_batch, None, sgd),
    "recomputed": (llama, hf_batch, None, sgd),
    "accumulated": (llama, hf_batch, None, sgd),
    "convolutional": (Convolutional, batch, loss_of, sgd),
    "attentive": (Attentive, batch, loss_of, sgd),
    "recurrent": (Recurrent, batch, loss_of, sgd),
    "packed": (Packed, batch, loss_of, sgd),
    "packed_whole": (Packed, batch, loss_of, sgd),
    "interleaved": (Interleaved, batch, loss_of, sgd),
    "masked": (Masked, batch, loss_of_some, sgd),
    "fsdp_tp": (Net, batch, loss_of, sgd),
    "autocast": (Cast, batch, loss_of, sgd),
    "written": (Written, batch, loss_of, sgd),
}
REFUSED = ("written",)


COUNTED = ("megatron", "fsdp")
"""Whose collectives are counted; torch's mode for that has trouble with modules that run on local tensors."""


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(name, plan, mesh):
    build, sample, loss_fn, optimizer_of = SCENARIOS[name]
    torch.manual_seed(0)
    model = build()
    alone = copy.deepcopy(model)
    optimizer, theirs = optimizer_of(model.parameters()), optimizer_of(alone.parameters())
    lowered = plan.to_dtensor(mesh)
    lowered.apply(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses, gradients, communicated = [], {}, {}
    for number in range(STEPS):
        given = {key: torch.randint(0, VOCABULARY, each.shape, generator=generator) for key, each in sample().items()}

        def loss_under(net, inputs):
            if loss_fn is None:
                return net(**inputs).loss
            return loss_fn(net(inputs["tokens"]), inputs["target"])

        with CommDebugMode() if name in COUNTED else contextlib.nullcontext() as seen:
            loss = loss_under(model, lowered.shard(**given))
            loss.backward()
        wanted = loss_under(alone, given)
        wanted.backward()
        losses.append(abs(float(whole(loss.detach())) - float(wanted.detach())) / float(wanted.detach()))
        if number == 0:
            counts = seen.get_comm_counts() if seen is not None else {}
            communicated = {str(kind).rpartition(".")[2]: count for kind, count in counts.items()}
            pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
            gradients = {
                key: float((whole(a.grad) - b.grad).abs().max() / b.grad.abs().max())
                for (key, a), b in pairs
                if b.grad is not None and float(b.grad.abs().max()) > 1e-7
            }
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    parameters = dict(model.named_parameters())
    return {
        "losses": max(losses),
        "gradients": max(gradients.values()),
        "parameters": max(
            float((whole(a.detach()) - b.detach()).abs().max())
            for a, b in zip(model.parameters(), alone.parameters(), strict=True)
        ),
        "buffers": max(
            (float((whole(a) - b).abs().max()) for a, b in zip(model.buffers(), alone.buffers(), strict=True)),
            default=0.0,
        ),
        "placements": {key: str(each.placements) for key, each in parameters.items()},
        "as_planned": all(each.placements == lowered.parameters[key] for key, each in parameters.items()),
        "states_as_planned": all(
            value.placements == lowered.optimizer_state[f"{key}.{kind}"]
            for key, each in parameters.items()
            for kind, value in optimizer.state[each].items()
            if isinstance(value, DTensor)
        ),
        "local": {key: list(each.to_local().shape) for key, each in parameters.items()},
        "communicated": communicated,
        "inexpressible": list(lowered.inexpressible),
        "tp_plan": lowered.hf_tp_plan(alone),
    }


def main():
    directory, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    if cuda:
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cuda" if cuda else "cpu", (2, 2))
    ops, writes = ({}, {}) if cuda else (differences(mesh), written(mesh))
    seen = {}
    for file in sorted(directory.glob("plan_*.json")):
        name = file.stem.removeprefix("plan_")
        plan = Plan.load(file)
        try:
            mesh = init_device_mesh("cuda" if cuda else "cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axis_names)
            seen[name] = trained(name, plan, mesh)
        except LoweringError as error:
            if name not in REFUSED:
                raise
            seen[name] = {"refused": str(error)}
        except Exception:
            seen[name] = {"failed": traceback.format_exc()}
            if rank == 0:
                print(seen[name]["failed"], file=sys.stderr)
            break  # the other processes wait in another collective now
    if rank == 0:
        (directory / "seen.json").write_text(json.dumps({**seen, "ops": ops, "writes": writes}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
