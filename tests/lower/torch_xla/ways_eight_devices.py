"""torch_xla's ways of working, each training under a plan on eight virtual devices; for `test_ways.py`.

python -m tests.lower.torch_xla.ways_eight_devices OUT.json [SCENARIO...]
"""

import copy
import os
import weakref
from functools import partial

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

from autoshard.api import plan_program
from autoshard.errors import CaptureError
from autoshard.frontends.choose import switches_for
from autoshard.frontends.torch_xla.program import capture, prepare_runtime
from autoshard.mesh import Mesh, spec_axes
from autoshard.plans.value import PlanMismatchError
from tests.lower.torch_xla import scenarios
from tests.lower.torch_xla.alternating import alternating
from tests.lower.torch_xla.annotations_traced import lacking, placed_otherwise

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


def planned(model, dtype=torch.float32, mesh=MESH, **of_step):
    switches = switches_for(None, **of_step)
    how = {"loss_fn": torch.nn.functional.mse_loss, "optimizer": sgd, "switches": switches}
    return alternating(capture(model, batch(0, dtype), **how), mesh)


MISSING = weakref.WeakKeyDictionary()
"""By model: how many annotations of its plan its traced steps lacked, in the worst one."""


def look(plan, model, loss):
    """At a step that is traced and has not run."""
    missing = lacking(plan, [loss.detach(), *model.parameters()])
    MISSING[model] = max(missing, MISSING.get(model, 0))


def trained(plan, model, steps=range(STEPS), dtype=torch.float32, run=None, called=None, clip=None):
    """Train under a plan, `called` in the model's place if given; returns the losses and the optimizer."""
    optimizer = sgd(model.parameters())
    plan.apply(model, optimizer)

    def step(x, y):
        with plan.annotate():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss((called or model)(x), y)
            loss.backward()
            clipped(model, clip)
            optimizer.step()
        look(plan, model, loss)
        return loss.detach()

    losses = []
    for number in steps:
        loss = (run or (lambda f: f))(step)(*(t.to("xla") for t in batch(number, dtype)))
        torch_xla.sync()
        losses.append(loss.float().item())
    return losses, optimizer


def clipped(model, norm):
    if norm is not None:
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        assert found.device.type == "xla" or found > 2 * norm


def alone(model, dtype=torch.float32, steps=range(STEPS), clip=None):
    optimizer = sgd(model.parameters())
    losses = []
    for number in steps:
        x, y = batch(number, dtype)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        clipped(model, clip)
        optimizer.step()
        losses.append(loss.float().item())
    return losses


def compared(losses, wanted, model, reference, plan):
    return {
        "split": sum(any(each.spec) for each in plan.parameters.values()),
        "otherwise": placed_otherwise(plan, model.named_parameters()),
        "lacking": MISSING.get(model),
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "parameters": max(
            float((a.detach().cpu().float() - b.detach().float()).abs().max())
            for a, b in zip(model.parameters(), reference.parameters(), strict=True)
        ),
    }


def fresh(**options):
    torch.manual_seed(0)
    return Net(**options)


def recomputed_as_planned():
    model, reference = fresh(), fresh()
    plan = planned(model, remat={"blocks.0": "all", "blocks.1": "products"})
    losses, _ = trained(plan, model)
    again = len(plan.program.ops) - len(planned(fresh()).program.ops)
    return {**compared(losses, alone(reference), model, reference, plan), "computed_again": again}


class Normed(Block):
    """Statistics that a block updates, and views of its parameters, which functionalization makes again."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x * self.scale.view(1, 16) - self.mean)


def statistics_recomputed():
    models = [torch.nn.Sequential(torch.nn.Linear(16, 16), Normed(), Normed()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    model, reference = models
    switches = switches_for(None, remat={"1": "all", "2": "products"})
    how = {"loss_fn": torch.nn.functional.mse_loss, "optimizer": sgd, "switches": switches}
    plan = plan_program(capture(model, batch(0), **how), MESH)
    losses, _ = trained(plan, model)
    found = compared(losses, alone(reference), model, reference, plan)
    buffers = zip(model.buffers(), reference.buffers(), strict=True)
    return {**found, "buffers": max(float((a.cpu() - b).abs().max()) for a, b in buffers)}


def accumulated(model, number, place, count):
    """The loss of a step of micro-batches, whose gradients are added up."""
    loss = 0.0
    for micro in range(count):
        x, y = (each.to(place) for each in batch(count * number + micro))
        made = torch.nn.functional.mse_loss(model(x), y)
        made.backward()
        loss = loss + made.detach()
    return loss


def gradients_clipped(norm=0.05):
    model, reference = fresh(), fresh()
    plan = planned(model, clip_grad_norm=norm)
    losses, _ = trained(plan, model, clip=norm)
    return compared(losses, alone(reference, clip=norm), model, reference, plan)


def micro_batches(count=4, clip=None):
    model, reference = fresh(), fresh()
    plan = planned(model, micro_batches=count, clip_grad_norm=clip)
    optimizer, alone = sgd(model.parameters()), sgd(reference.parameters())
    plan.apply(model, optimizer)
    losses, wanted = [], []
    for number in range(STEPS):
        with plan.annotate():
            optimizer.zero_grad()
            loss = accumulated(model, number, "xla", count)
            clipped(model, clip)
            optimizer.step()
        look(plan, model, loss)
        torch_xla.sync()
        losses.append(loss.item())
        alone.zero_grad()
        wanted.append(accumulated(reference, number, "cpu", count).item())
        clipped(reference, clip)
        alone.step()
    return compared(losses, wanted, model, reference, plan)


def activation_checkpointing_of_torch():
    return activation_checkpointing(partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))


def activation_checkpointing(checkpoint=torch_xla.utils.checkpoint.checkpoint):
    model, reference = fresh(checkpoint=checkpoint), fresh()
    plan = planned(model)
    losses, _ = trained(plan, model)
    again = len(plan.program.ops) - len(planned(fresh()).program.ops)
    return {**compared(losses, alone(reference), model, reference, plan), "computed_again": again}


class Cast(Net):
    def forward(self, x):
        with torch.autocast("cuda" if x.device.type == "xla" else "cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def autocast():
    torch.manual_seed(0)
    model = Cast()
    reference, plan = copy.deepcopy(model), planned(model)
    losses, _ = trained(plan, model)
    return compared(losses, alone(reference), model, reference, plan)


def scaled():
    """A gradient scaler in the loop."""
    model, scaler = fresh(), torch.amp.GradScaler("xla")
    plan, optimizer = planned(model), sgd(model.parameters())
    plan.apply(model, optimizer)
    x, y = (t.to("xla") for t in batch(0))
    try:
        with plan.annotate():
            scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
    except CaptureError as error:
        return {"refused": str(error)}


def bf16():
    model, reference = fresh().bfloat16(), fresh().bfloat16()
    plan = planned(model, torch.bfloat16)
    losses, _ = trained(plan, model, dtype=torch.bfloat16)
    return compared(losses, alone(reference, torch.bfloat16), model, reference, plan)


def eager_and_compile():
    """Eager mode for everything but the step, which is compiled; planning does without it."""
    import torch_xla.experimental

    model, reference = fresh(), fresh()
    torch_xla.experimental.eager_mode(True)
    try:
        plan = planned(model)
        assert torch_xla.experimental.is_eager_mode()
        losses, _ = trained(plan, model, run=lambda step: torch_xla.compile(step, full_graph=True))
    finally:
        torch_xla.experimental.eager_mode(False)
    return compared(losses, alone(reference), model, reference, plan)


def dynamo():
    """A model under `torch.compile`: the planned step is traced as a whole, and dynamo compiles nothing of it."""
    from torch._dynamo.utils import counters

    model, reference = fresh(), fresh()
    plan = planned(model)
    losses, _ = trained(plan, model, called=torch.compile(model, backend="openxla"))
    graphs = counters["stats"].get("unique_graphs", 0)
    return {**compared(losses, alone(reference), model, reference, plan), "graphs": graphs}


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


def checkpoint_between_plans():
    """Parameters and momenta, saved under one plan and loaded under another."""
    import tempfile

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner

    from autoshard.lower.checkpoint import SavePlanner

    def state(model, optimizer):
        momenta = {n: optimizer.state[p]["momentum_buffer"] for n, p in model.named_parameters()}
        return {"model": dict(model.state_dict()), "momenta": momenta}

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model, other = fresh(), fresh()
    saved_under = planned(model)
    _, optimizer = trained(saved_under, model)
    with tempfile.TemporaryDirectory() as directory:
        dcp.save(state(model, optimizer), checkpoint_id=directory, planner=SavePlanner())
        stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        plan = planned(other, mesh=Mesh((4, 2), ("data", "model")))
        _, its_optimizer = trained(plan, other, steps=range(1))
        dcp.load(state(other, its_optimizer), checkpoint_id=directory, planner=SPMDLoadPlanner())
    torch.distributed.destroy_process_group()
    halved = [p for p in saved_under.parameters.values() if len(spec_axes(p.spec)) == 1]
    found, wanted = state(other, its_optimizer), state(model, optimizer)
    return {
        "stored": len(stored),
        "partial": len(halved),
        "difference": max(
            float((found[part][name].detach().cpu() - wanted[part][name].detach().cpu()).abs().max())
            for part in found
            for name in found[part]
        ),
        "otherwise": placed_otherwise(plan, other.named_parameters()),
    }


def fsdpv2_beside():
    """A model under torch_xla's FSDPv2 trains in the same process, step by step beside a planned one."""
    import numpy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    model, beside, reference = fresh(), fresh(), fresh()
    plan = planned(model)
    optimizer = sgd(model.parameters())
    plan.apply(model, optimizer)
    mesh = xs.Mesh(numpy.arange(8), (8, 1), ("fsdp", "model"))

    def shard_output(output, mesh):
        xs.mark_sharding(output, mesh, ("fsdp", None))

    wrapped = SpmdFullyShardedDataParallel(beside.to("xla"), mesh=mesh, shard_output=shard_output)
    theirs = sgd(wrapped.parameters())
    losses, their_losses = [], []
    for number in range(STEPS):
        x, y = (t.to("xla") for t in batch(number))
        with plan.annotate():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        look(plan, model, loss)
        torch_xla.sync()
        x, y = (xs.mark_sharding(t.to("xla"), mesh, ("fsdp", None)).global_tensor for t in batch(number))
        theirs.zero_grad()
        their_loss = torch.nn.functional.mse_loss(wrapped(x), y)
        their_loss.backward()
        theirs.step()
        torch_xla.sync()
        losses.append(loss.item())
        their_losses.append(their_loss.item())
    wanted = alone(reference)
    ours = compared(losses, wanted, model, reference, plan)
    other = compared(their_losses, wanted, beside, reference, plan)
    shardings = {torch_xla._XLAC._get_xla_sharding_spec(each) for each in beside.parameters() if each.dim() == 2}
    worse = {key: max(ours[key], other[key]) for key in ("losses", "parameters")}
    return {**ours, **worse, "theirs": sorted(shardings)}


class Accumulating(torch.nn.Module):
    """The mean loss of several parts of a batch, one after the other, as a loop that accumulates gradients has it."""

    def __init__(self, model, parts):
        super().__init__()
        self.model = model
        self.parts = parts

    def forward(self, x, y):
        losses = [
            torch.nn.functional.mse_loss(self.model(a), b)
            for a, b in zip(x.chunk(self.parts), y.chunk(self.parts), strict=True)
        ]
        return sum(losses) / self.parts


def gradient_accumulation():
    model, reference = Accumulating(fresh(), 2), fresh()
    program = capture(model, batch(0), optimizer=sgd)
    plan = alternating(program, MESH)
    optimizer = sgd(model.parameters())
    plan.apply(model, optimizer)
    losses = []
    for number in range(STEPS):
        with plan.annotate():
            optimizer.zero_grad()
            loss = model(*(t.to("xla") for t in batch(number)))
            loss.backward()
            optimizer.step()
        look(plan, model, loss)
        torch_xla.sync()
        losses.append(loss.item())
    return compared(losses, alone(reference), model, reference, plan)


class Reading(torch.nn.Module):
    """Reads values while it runs: a mask's, the positions that it names, the largest of what it computes."""

    def __init__(self):
        super().__init__()
        self.net = fresh()

    def forward(self, x, mask):
        if not mask.any():
            raise ValueError("nothing is left")
        y = self.net(x)
        y = y / max(1.0, y.detach().abs().max().item())
        return y[mask > 0]


def values_read():
    """Numbers with values read in the step; then a batch whose mask makes another program of it."""
    model, reference = Reading(), Reading()
    masks = [(torch.arange(8) % 2 == number % 2).long() for number in range(STEPS)]
    program = capture(model, (batch(0)[0], masks[0]), loss_fn=squares, optimizer=sgd)
    plan = alternating(program, MESH)
    optimizer, its_optimizer = sgd(model.parameters()), sgd(reference.parameters())
    plan.apply(model, optimizer)

    def step(number, mask):
        with plan.annotate():
            optimizer.zero_grad()
            loss = squares(model(batch(number)[0].to("xla"), mask.to("xla")))
            loss.backward()
            optimizer.step()
        torch_xla.sync()
        return loss.item()

    losses, wanted = [step(number, mask) for number, mask in enumerate(masks)], []
    for number, mask in enumerate(masks):
        its_optimizer.zero_grad()
        loss = squares(reference(batch(number)[0], mask))
        loss.backward()
        its_optimizer.step()
        wanted.append(loss.item())
    try:
        step(0, torch.ones(8, dtype=torch.long))
        refused = ""
    except PlanMismatchError as error:
        refused = str(error)
    return {**compared(losses, wanted, model, reference, plan), "refused": refused, "reads": len(plan.program.reads)}


def squares(y):
    return y.square().mean()


class Scanned(torch.nn.Module):
    """Equal layers under torch_xla's `scan_layers`."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList([Plain(), Plain(), Plain()])

    def forward(self, x):
        from torch_xla.experimental.scan_layers import scan_layers

        return scan_layers(self.layers, self.stem(x))


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 64)
        self.down = torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def layers_scanned():
    torch.manual_seed(0)
    model = Scanned()
    reference = torch.nn.Sequential(model.stem, *model.layers)
    reference = copy.deepcopy(reference)
    plan = planned(model)
    losses, _ = trained(plan, model)
    return compared(losses, alone(reference), model, reference, plan)


class Marking(torch.nn.Module):
    """Marks what it computes with torch_xla's own functions, and puts its barrier and its linear layers in."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        x = self.net.stem(x)
        if x.device.type == "xla":
            x = xs.mark_sharding_with_gradients(x, xs.get_global_mesh(), ("data", None))
        x = self.net.blocks[0](x)
        if x.device.type == "xla":
            xs.mark_sharding(x, xs.get_global_mesh(), (None, "model"))
        return self.net.blocks[1](x)


class Scaled(Net):
    """With a learned temperature of no dims, as CLIP has."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x) * self.scale.exp()


def scalar_parameter():
    torch.manual_seed(0)
    model = Scaled()
    reference = copy.deepcopy(model)
    plan = planned(model)
    losses, _ = trained(plan, model)
    return compared(losses, alone(reference), model, reference, plan)


def marks_inside():
    import numpy

    torch.manual_seed(0)
    model = Marking()
    reference = copy.deepcopy(model)
    xs.set_global_mesh(xs.Mesh(numpy.arange(8), (2, 4), ("data", "model")))
    xs.apply_backward_optimization_barrier(model.net.blocks[0])
    xs.xla_sharding.apply_xla_patch_to_nn_linear(model)
    plan = planned(model)
    losses, _ = trained(plan, model)
    return compared(losses, alone(reference), model, reference, plan)


SCENARIOS = {
    "layers_scanned": layers_scanned,
    "values_read": values_read,
    "checkpoint_between_plans": checkpoint_between_plans,
    "fsdpv2_beside": fsdpv2_beside,
    "gradient_accumulation": gradient_accumulation,
    "recomputed_as_planned": recomputed_as_planned,
    "statistics_recomputed": statistics_recomputed,
    "micro_batches": micro_batches,
    "two_micro_batches": partial(micro_batches, 2),
    "gradients_clipped": gradients_clipped,
    "micro_batches_clipped": partial(micro_batches, 4, 0.1),
    "activation_checkpointing": activation_checkpointing,
    "activation_checkpointing_of_torch": activation_checkpointing_of_torch,
    "bf16": bf16,
    "autocast": autocast,
    "scaled": scaled,
    "eager_and_compile": eager_and_compile,
    "dynamo": dynamo,
    "sharded_tensors": sharded_tensors,
    "scalar_parameter": scalar_parameter,
    "marks_inside": marks_inside,  # last: torchax is imported then, and checkpoints ask its device for streams
}


if __name__ == "__main__":
    scenarios.main(SCENARIOS)
