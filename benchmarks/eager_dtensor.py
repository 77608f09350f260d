"""`plan.to_dtensor()` beside eager PyTorch, for `eager.py`: processes of a gloo world on the CPU, one a device.

python -m benchmarks.eager_dtensor FOLDER RANK MODEL OPTIMIZER
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import autoshard
from autoshard.api import Plan
from autoshard.errors import LoweringError
from autoshard.lower.dtensor.distribute import DTensorPlan
from autoshard.mesh import Mesh
from autoshard.program import Program
from autoshard.verify.eager import Comparison, Numbers
from benchmarks import eager_cases, eager_steps

TIME_LIMIT_S = 300
MESH = "2x2"


def of_to_dtensor(pair: eager_steps.Pair, program: Program, model: str, optimizer: str) -> Comparison:
    """What a planned model of a name has after each step, put together from its shards.

    Raises:
        LoweringError: what a process said that failed.
    """
    mesh = Mesh.parse(MESH, device=str(eager_steps.DEVICE))
    plan = autoshard.plan_program(program, mesh, rivals=False, time_limit=60)
    with tempfile.TemporaryDirectory(prefix="autoshard-eager-") as directory, contextlib.ExitStack() as stack:
        folder = Path(directory)
        plan.save(folder / "plan.json")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PYTHONWARNINGS": "ignore"}
        ranks = []
        for rank in range(mesh.size):
            said = stack.enter_context((folder / f"said{rank}").open("w"))
            command = [sys.executable, "-m", "benchmarks.eager_dtensor", directory, str(rank), model, optimizer]
            ranks.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        try:
            for each in ranks:
                each.wait(TIME_LIMIT_S)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        for rank, each in enumerate(ranks):
            if each.returncode:
                lines = [line for line in (folder / f"said{rank}").read_text().splitlines() if line.strip()]
                raise LoweringError(lines[-1] if lines else f"exit status {each.returncode}")
        found: list[Numbers] = torch.load(folder / "found.pt")
    return pair.compared(found, first_of(pair))


def first_of(pair: eager_steps.Pair) -> int:
    """The step before which a model is distributed."""
    return 0 if pair.warm <= 1 else pair.warm


def main() -> None:
    """One process."""
    folder, rank, name, optimizer_name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    plan = Plan.load(folder / "plan.json")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=plan.mesh.size)
    mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axis_names)
    pair = eager_steps.Pair(eager_cases.source(name, optimizer_name), eager_cases.WARM.get(optimizer_name, 1))
    first = first_of(pair)
    model, optimizer = pair.made(first)
    lowered = plan.to_dtensor(mesh)
    lowered.apply(model, optimizer)
    taken = pair.taken(model, optimizer, [split(pair, batch, lowered) for batch in pair.batches[first:]])
    next(taken)
    found = [{key: whole(each) for key, each in numbers.items()} for numbers in taken]
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def split(pair: eager_steps.Pair, batch: Any, lowered: DTensorPlan) -> Any:
    """A batch whose tensors are placed as planned."""
    named = {name: tensor for name, tensor in pair.named_inputs(batch).items() if name in lowered.inputs}
    placed = lowered.shard(**named)
    by_id = {id(tensor): placed[name] for name, tensor in named.items()}
    return tree_map(lambda leaf: by_id.get(id(leaf), leaf), batch)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, of all its shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main()
