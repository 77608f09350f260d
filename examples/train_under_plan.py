"""Train a small GPT-2 under a plan, on eight virtual devices of this machine's CPU, and hold it against one device.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 python examples/train_under_plan.py

On a TPU the same program runs as it is, with the mesh of its devices. Nothing of the model or of the training loop is
written for the plan: `apply` once, `annotate` around each step.
"""

import copy
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import torch
import torch_xla
import torch_xla.runtime
import transformers

import autoshard

BATCH, TOKENS, VOCABULARY, STEPS = 8, 64, 512, 5


def batches():
    """Random tokens, as an ordinary loader would give them: on the CPU."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)


def main():
    torch_xla.runtime.use_spmd()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=128, n_head=4, n_positions=TOKENS, vocab_size=VOCABULARY,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    their_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    plan = autoshard.plan(
        model, {"input_ids": tokens, "labels": tokens}, mesh=(2, 4), device="cpu", optimizer=optimizer
    )
    print(plan)

    plan.apply(model, optimizer)
    worst = 0.0
    for step, batch in enumerate(batches()):
        with plan.annotate():
            tokens = batch.to("xla")
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()
        wanted = reference(input_ids=batch, labels=batch).loss
        wanted.backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}, on one device {wanted.item():.6f}")
        worst = max(worst, abs(loss.item() - wanted.item()) / wanted.item())
    print(f"losses differ by at most {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
