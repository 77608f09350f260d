"""Train a small GPT-2 in jax under a plan that was made for its PyTorch code, and hold it against PyTorch itself.

    python examples/run_in_jax.py                    # eight virtual devices of this machine's CPU
    JAX_PLATFORMS=cuda,cpu python examples/run_in_jax.py --mesh 2x4 --device h100   # on a machine with eight GPUs

The model, the loss and the optimizer are PyTorch's. Their step is captured once (on the CPU, by torch_xla), planned,
and run by jax on whatever devices jax has.
"""

import argparse
import copy
import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import transformers

import autoshard

BATCH, TOKENS, VOCABULARY, STEPS = 8, 32, 509, 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--device", default="cpu", help="kind of device to plan for")
    options = parser.parse_args()
    devices = math.prod(int(size) for size in options.mesh.split("x"))
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")  # before jax starts

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, n_positions=TOKENS, vocab_size=VOCABULARY, use_cache=False,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = copy.deepcopy(model)
    their_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)

    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    program = autoshard.capture(model, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer)
    plan = autoshard.plan_program(program, autoshard.Mesh.parse(options.mesh, device=options.device))
    print(plan)

    step = plan.to_jax().step(program, optimizer, precision="highest")  # f32, to be compared
    state = step.place(model, optimizer)
    weight = state["transformer.wte.weight"]
    print(f"\ntransformer.wte.weight in jax: {weight.sharding.spec} on {sorted(weight.devices(), key=str)}")
    worst = 0.0
    for number in range(STEPS):
        state, outputs = step(state, {"input_ids": tokens, "labels": tokens})
        wanted = reference(input_ids=tokens, labels=tokens).loss
        wanted.backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
        print(f"step {number}: loss {float(outputs['loss']):.6f}, PyTorch on one device {wanted.item():.6f}")
        worst = max(worst, abs(float(outputs["loss"]) - wanted.item()) / wanted.item())
    step.restore(state, model, optimizer)
    print(f"losses differ by at most {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
