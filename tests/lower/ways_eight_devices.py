"""torch_xla's ways of working, each training under a plan on eight virtual devices; for `test_ways.py`.

python -m tests.lower.ways_eight_devices OUT.json [SCENARIO...]
"""

import os

os.environ.update(
    PJRT_DEVICE="CPU",
    CPU_NUM_DEVICES="8",
    XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    TF_CPP_MIN_LOG_LEVEL="3",
)

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.utils.checkpoint

from autoshard.capture.torch_xla import capture, prepare_runtime
from autoshard.mesh import Mesh
from tests.lower import scenarios
from tests.lower.alternating import alternating

prepare_runtime(8)
MESH = Mesh((2, 4), ("data", "model"))
STEPS = 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 64)
        self.down = torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Blocks, whose forward passes are computed again in the backward pass if `checkpoint` is given."""

    def __init__(self, checkpoint=None):
        super().__init__()
        self.stem = torch.nn.Linear(16, 16)  # so that the first block's input has a gradient: checkpoints need that
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.checkpoint = checkpoint

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.checkpoint else block(x)
        return x


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(8, 16, generator=generator).to(dtype) for _ in range(2))


def planned(model, dtype=torch.float32, mesh=MESH):
    program = capture(model, batch(0, dtype), loss_fn=torch.nn.functional.mse_loss, optimizer=sgd)
    return alternating(program, mesh)


def trained(plan, model, steps=range(STEPS), dtype=torch.float32, run=None):
    """Train under a plan; returns the losses and the optimizer."""
    optimizer = sgd(model.parameters())
    plan.apply(model, optimizer)

    def step(x, y):
        with plan.annotate():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

    losses = []
    for number in steps:
        loss = (run or (lambda f: f))(step)(*(t.to("xla") for t in batch(number, dtype)))
        torch_xla.sync()
        losses.append(loss.float().item())
    return losses, optimizer


def alone(model, dtype=torch.float32, steps=range(STEPS)):
    optimizer = sgd(model.parameters())
    losses = []
    for number in steps:
        x, y = batch(number, dtype)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.float().item())
    return losses


def compared(losses, wanted, model, reference):
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "parameters": max(
            float((a.detach().cpu().float() - b.detach().float()).abs().max())
            for a, b in zip(model.parameters(), reference.parameters(), strict=True)
        ),
    }


def fresh(**options):
    torch.manual_seed(0)
    return Net(**options)


def activation_checkpointing():
    model, reference = fresh(checkpoint=torch_xla.utils.checkpoint.checkpoint), fresh()
    losses, _ = trained(planned(model), model)
    return compared(losses, alone(reference), model, reference)


def bf16():
    model, reference = fresh().bfloat16(), fresh().bfloat16()
    losses, _ = trained(planned(model, torch.bfloat16), model, dtype=torch.bfloat16)
    return compared(losses, alone(reference, torch.bfloat16), model, reference)


def eager_and_compile():
    """Eager mode for everything but the step, which is compiled."""
    import torch_xla.experimental

    model, reference = fresh(), fresh()
    plan = planned(model)
    torch_xla.experimental.eager_mode(True)
    try:
        losses, _ = trained(plan, model, run=lambda step: torch_xla.compile(step, full_graph=True))
    finally:
        torch_xla.experimental.eager_mode(False)
    return compared(losses, alone(reference), model, reference)


def sharded_tensors():
    """What `XLAShardedTensor` says of each parameter, beside the plan."""
    model = fresh()
    plan = planned(model)
    trained(plan, model, steps=range(1))
    differing = []
    for name, parameter in model.named_parameters():
        wrapped = xs.wrap_if_sharded(parameter)
        spec = plan.parameters[name].spec
        want = tuple(-(-size // plan.mesh.ways(axes)) for size, axes in zip(parameter.shape, spec, strict=True))
        if isinstance(wrapped, xs.XLAShardedTensor):
            shards = wrapped.local_shards
            whole = parameter.detach().cpu()
            equal = all(torch.equal(shard.data, whole[shard.indices]) for shard in shards)
            have = {tuple(shard.data.shape) for shard in shards}
        else:
            equal, have = True, {tuple(parameter.shape)}
        if have != {want} or not equal:
            differing.append([name, str(spec), str(have), equal])
    split = sum(any(each.spec) for each in plan.parameters.values())
    return {"differing": differing, "split": split}


SCENARIOS = {
    "activation_checkpointing": activation_checkpointing,
    "bf16": bf16,
    "eager_and_compile": eager_and_compile,
    "sharded_tensors": sharded_tensors,
}


if __name__ == "__main__":
    scenarios.main(SCENARIOS)
