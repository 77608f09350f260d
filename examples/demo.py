"""Plan GPT-2's AdamW step for 8 TPU v5e, beside the plans people write by hand; verify it; train under a plan.

`make demo` runs this. No accelerator is needed: the TPU's own compiler checks the plan, and the training is on virtual
CPU devices.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

MESH, DEVICE, TARGET = "2x4", "tpu-v5e", "tpu-v5e:2x4"
BATCH, SEQ = 8, 512
RIVALS = ("dp", "fsdp", "megatron")


def main() -> int:
    """Run all steps; the exit status is that of the worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory for the plans")
    parser.add_argument("--target", default=TARGET, help="whose compiler verifies the plan (default %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    whole, small = options.out / "gpt2.plan.json", options.out / "gpt2-2-layers.plan.json"

    title(f"1. Plan the AdamW step of GPT-2 124M (batch {BATCH}, sequence {SEQ}) on a {MESH} mesh of {DEVICE}")
    plan_beside_rivals(whole)

    title(f"2. Hold it against what {options.target}'s own compiler makes of it")
    status = autoshard("verify", whole, "hf:gpt2", "--target", options.target)

    title("3. Train a 2-layer GPT-2 for three steps on 8 virtual CPU devices under its plan, and on one device")
    layers = ("--set", "n_layer=2")
    # Shorter sequences than above: these steps are computed, on this machine.
    shape = ("--batch", str(BATCH), "--seq", "64")
    planned = autoshard("plan", "hf:gpt2", *layers, *shape, "--mesh", MESH, "--train", "sgd", "-o", small, quiet=True)
    if planned:
        return planned
    return max(status, autoshard("verify", small, "hf:gpt2", *layers, "--target", "cpu", "--run"))


def plan_beside_rivals(path: Path) -> None:
    """Print and save the plan, then the predicted figures of it and of the manual plans."""
    import autoshard
    from autoshard.comparison.compared import compare_program
    from autoshard.sources import load_source

    started, cpu = time.perf_counter(), time.process_time()
    source = load_source("hf:gpt2", batch=BATCH, seq=SEQ, train="adamw")
    program = autoshard.capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    mesh = autoshard.Mesh.parse(MESH, device=DEVICE)
    plan = autoshard.plan_program(program, mesh)
    plan.save(path)
    seconds = f"{time.perf_counter() - started:.1f} s, {time.process_time() - cpu:.1f} CPU s"
    print(plan, f"\n\nPlanned in {seconds}, imports and capture included; written to {path}", sep="")
    print("\nPredicted, beside plans written by hand:\n")
    print(compare_program(program, mesh, plans=RIVALS, others={"auto": plan}))


def autoshard(*arguments: object, quiet: bool = False) -> int:
    """Run the command line in a process of its own, and say what is run."""
    command = ["autoshard", *map(str, arguments)]
    print("$", *command, flush=True)
    hidden = subprocess.DEVNULL if quiet else None
    return subprocess.run([sys.executable, "-m", *command], stdout=hidden, check=False).returncode


def title(text: str) -> None:
    """A heading."""
    print(f"\n=== {text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
