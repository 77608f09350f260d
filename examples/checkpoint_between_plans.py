"""Train under one plan, save, load under another, train on: on eight virtual devices of this machine's CPU.

    python examples/checkpoint_between_plans.py

What each device holds of a parameter is what the plan says: `XLAShardedTensor` shows it.
"""

import copy
import os
import tempfile

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner

import autoshard
from autoshard.lower.checkpoint import SavePlanner

ROWS, WIDTH, STEPS = 64, 64, 3


def network():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plan_for(mesh, split):
    with torch.device("meta"):
        model = network()
    x = torch.zeros(ROWS, WIDTH)
    hints = {"0.weight": split, "2.weight": split}  # so small a network would not be split otherwise
    return autoshard.plan(
        model, (x, x), mesh=mesh, device="cpu", loss_fn=torch.nn.functional.mse_loss, optimizer=sgd, hints=hints
    )


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def step_under(plan, model, optimizer, number):
    with plan.annotate():
        x, y = (each.to("xla") for each in batch(number))
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch_xla.sync()
    return loss.item()


def state_of(model, optimizer):
    momenta = {name: optimizer.state[each]["momentum_buffer"] for name, each in model.named_parameters()}
    return {"model": model.state_dict(), "momenta": momenta}


def shards(model):
    weight = xs.wrap_if_sharded(model[0].weight)
    return sorted({tuple(shard.data.shape) for shard in weight.local_shards})


def main():
    torch_xla.runtime.use_spmd()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(0)
    model = network()
    reference = copy.deepcopy(model)
    first, second = plan_for("2x4", "[model],[]"), plan_for("4x2", "[],[data]")

    optimizer = sgd(model.parameters())
    first.apply(model, optimizer)
    losses = [step_under(first, model, optimizer, number) for number in range(STEPS)]
    print(f"0.weight under the first plan, in parts of {shards(model)}")
    with tempfile.TemporaryDirectory() as directory:
        dcp.save(state_of(model, optimizer), checkpoint_id=directory, planner=SavePlanner())

        other = network()  # other weights, until the checkpoint is loaded
        its_optimizer = sgd(other.parameters())
        second.apply(other, its_optimizer)
        state = state_of(other, its_optimizer)
        dcp.load(state, checkpoint_id=directory, planner=SPMDLoadPlanner())
    print(f"0.weight under the second plan, in parts of {shards(other)}")
    losses += [step_under(second, other, its_optimizer, number) for number in range(STEPS, 2 * STEPS)]
    dist.destroy_process_group()

    theirs, worst = sgd(reference.parameters()), 0.0
    for number, loss in enumerate(losses):
        x, y = batch(number)
        wanted = torch.nn.functional.mse_loss(reference(x), y)
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        print(f"step {number}: loss {loss:.6f}, on one device {wanted.item():.6f}")
        worst = max(worst, abs(loss - wanted.item()) / wanted.item())
    print(f"losses differ by at most {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
