"""What `tests/lower/test_to_jax.py` asserts on, seen in a process of its own with eight virtual CPU devices.

python -m tests.lower.jax_eight_devices OUT.json
"""

import copy
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_DEVICE"] = "CPU"

import jax
import numpy as np
import torch

import autoshard
from autoshard.frontends.switches.autocast import autocast_on
from autoshard.mesh import Mesh
from tests.lower.optimizers import counting, masters
from tests.lower.torch_xla import scenarios

STEPS, ROWS, VOCABULARY = 3, 16, 199
MESH = Mesh((2, 4))
SGD = {"lr": 0.1, "momentum": 0.9}


class Net(torch.nn.Module):
    """An odd vocabulary, an MLP, batch norm: uneven dims, buffers that are updated, integers."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.up = torch.nn.Linear(16, 64)
        self.down = torch.nn.Linear(64, VOCABULARY)

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens).mean(1))
        return self.down(torch.nn.functional.gelu(self.up(hidden)))


class Cast(Net):
    """Under autocast as users of CUDA write it."""

    def forward(self, tokens):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return super().forward(tokens)


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield {
            "tokens": torch.randint(0, VOCABULARY, (ROWS, 5), generator=generator),
            "target": torch.randint(0, VOCABULARY, (ROWS,), generator=generator),
        }


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def trained(optimizer_of, *, partitioner, hints=None, dtype=torch.float32, gamma=None, net=Net):
    """Differences between `STEPS` steps under a plan in jax and the same in eager PyTorch."""
    torch.manual_seed(0)
    model = net().to(dtype)
    reference = copy.deepcopy(model)
    optimizer, theirs = optimizer_of(model.parameters()), optimizer_of(reference.parameters())
    loss_fn = torch.nn.functional.cross_entropy
    sample = next(iter(batches()))
    program = autoshard.capture(model, sample, loss_fn=loss_fn, optimizer=optimizer)
    plan = autoshard.plan_program(program, MESH, hints=hints)
    step = plan.to_jax().step(program, optimizer, partitioner=partitioner)
    state = step.place(model, optimizer)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma) for o in (optimizer, theirs)] if gamma else []
    losses = []
    for batch in batches():
        state, outputs = step(state, batch)
        with autocast_on("cpu"):
            loss = loss_fn(reference(batch["tokens"]), batch["target"])
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
        wanted = float(loss.detach())
        losses.append(abs(float(outputs["loss"]) - wanted) / abs(wanted))
    weight = state["embed.weight"]
    step.restore(state, model, optimizer)
    ours, theirs_now = model.state_dict(), reference.state_dict()
    states = {
        f"{name}.{key}": difference(value.float(), theirs.state[parameter][key].float())
        for (name, parameter), mine in zip(reference.named_parameters(), model.parameters(), strict=True)
        for key, value in optimizer.state[mine].items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    return {
        "losses": max(losses),
        "parameters": max(float((ours[n].float() - theirs_now[n].float()).abs().max()) for n in ours),
        "states": max(states.values(), default=None),
        "weight": [str(weight.sharding.spec), list(weight.shape), list(weight.addressable_shards[0].data.shape)],
        "uneven": list(plan.to_jax().uneven),
        "compiled": step.jitted._cache_size(),
    }


UNEVEN = {"embed.weight": "[model],[]", "up.weight": "[model],[]", "down.weight": "[data],[model]"}


def sgd(**also):
    return trained(lambda ps: torch.optim.SGD(ps, **SGD), hints=UNEVEN, **also)


def adamw():
    return trained(lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3), partitioner="shardy", hints=UNEVEN)


def bf16():
    return trained(lambda ps: torch.optim.SGD(ps, **SGD), partitioner="shardy", dtype=torch.bfloat16)


def autocast():
    return trained(lambda ps: torch.optim.SGD(ps, **SGD), partitioner="shardy", hints=UNEVEN, net=Cast)


def collectives(partitioner):
    """Bytes of collectives, predicted and as jax compiles the step."""
    from autoshard.verify.collectives import compiled_collectives
    from autoshard.verify.fidelity import fidelity
    from autoshard.verify.hlo_text import parse_hlo

    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    x = torch.zeros(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    program = autoshard.capture(model, (x, x), loss_fn=torch.nn.functional.mse_loss, optimizer=optimizer)
    plan = autoshard.plan_program(program, MESH, hints={"0.weight": "[model],[]", "input": "[data],[]"})
    lowered = plan.to_jax().step(program, optimizer, partitioner=partitioner, precision="highest").lower()
    text = lowered.compile().as_text()
    found = fidelity(autoshard.evaluate(program, plan).collectives, compiled_collectives(parse_hlo(text), MESH, "cpu"))
    module = lowered.as_text()
    return {
        "fidelity": found.value,
        "bytes": found.compiled_bytes,
        "products": module.count("stablehlo.dot"),
        "highest": module.count("precision = [HIGHEST, HIGHEST]"),
        "form": ["sdy.sharding_constraint" in module, "@Sharding" in module],
    }


def dropout():
    """Two steps draw other numbers, two runs the same."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Dropout(0.5))
    x = torch.ones(8, 16)
    program = autoshard.capture(model.train(), x)
    plan = autoshard.plan_program(program, MESH)
    runs = []
    for _ in range(2):
        step = plan.to_jax().step(program)
        state = step.place(model)
        outs = []
        for _ in range(2):
            state, outputs = step(state, x)
            outs.append(np.asarray(next(iter(outputs.values()))))
        runs.append(outs)
    return {
        "zeros": float((runs[0][0] == 0).mean()),
        "steps_differ": bool((runs[0][0] != runs[0][1]).any()),
        "runs_equal": all(bool((a == b).all()) for a, b in zip(*runs, strict=True)),
    }


def stablehlo_file():
    """A step that jax exported, planned and run under its plan, against jax on one device."""
    import tempfile
    from pathlib import Path

    import jax.numpy as jnp

    from autoshard.frontends.stablehlo_file import read_program
    from tests.frontends.test_stablehlo_file import step as train

    def value(*shape):
        return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32) / 4

    params = {"w1": value(16, 32), "b1": value(32), "w2": value(32, 16)}
    state = {"params": params, "momentum": jax.tree.map(np.zeros_like, params)}
    batch = {"x": value(8, 16), "y": value(8, 16)}
    one = jax.devices()[0]
    put = jax.device_put((state, batch), one)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "step.mlir"
        file.write_text(jax.jit(train, donate_argnums=0).lower(*put).as_text(debug_info=True))
        program = read_program(file)
    plan = autoshard.plan_program(program, MESH, hints={"state.params.w1": "[],[model]"})
    step = plan.to_jax().step(program)
    ours = step.place(tensors={f"state.{k}.{n}": a for k, each in state.items() for n, a in each.items()})
    losses = []
    for _ in range(STEPS):
        ours, outputs = step(ours, {f"batch.{name}": array for name, array in batch.items()})
        (found,) = outputs.values()
        put = (jax.jit(train)(*put)[0], put[1]) if not losses else put
        losses.append(float(found))
    wanted, theirs = [], jax.device_put((state, batch), one)
    for _ in range(STEPS):
        new, loss = jax.jit(train)(*theirs)
        theirs = (new, theirs[1])
        wanted.append(float(loss))
    fetched = step.fetch(ours)
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "parameters": max(float(jnp.abs(fetched[f"state.params.{n}"] - theirs[0]["params"][n]).max()) for n in params),
    }


SCENARIOS = {
    "sgd": lambda: sgd(partitioner="shardy"),
    "sgd_gspmd": lambda: sgd(partitioner="gspmd"),
    "schedule": lambda: sgd(partitioner="shardy", gamma=0.5),
    "adamw": adamw,
    "masters": lambda: trained(masters, partitioner="shardy", hints=UNEVEN),
    "counting": lambda: trained(counting, partitioner="shardy"),
    "bf16": bf16,
    "autocast": autocast,
    "shardy_collectives": lambda: collectives("shardy"),
    "gspmd_collectives": lambda: collectives("gspmd"),
    "dropout": dropout,
    "stablehlo_file": stablehlo_file,
}


if __name__ == "__main__":
    scenarios.main(SCENARIOS)
