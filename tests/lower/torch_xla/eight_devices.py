"""Everything that needs a runtime of eight devices, in one process: writes what it saw as JSON to its argument.

Run by `test_mark_sharding.py`, which says what must be true of it.
"""

import copy
import gc
import json
import os
import sys

os.environ.update(
    PJRT_DEVICE="CPU",
    CPU_NUM_DEVICES="8",
    XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    TF_CPP_MIN_LOG_LEVEL="3",
)

import torch
import torch_xla
import torch_xla.debug.metrics as metrics

from autoshard.frontends.torch_xla.program import capture, prepare_runtime
from autoshard.lower.torch_xla.mark_sharding import annotated_program, input_shardings
from autoshard.mesh import Mesh
from tests.lower.torch_xla.alternating import alternating
from tests.lower.torch_xla.annotations_traced import lacking, placed_otherwise

prepare_runtime(8)
X = torch_xla._XLAC
MESH = Mesh((2, 4), ("data", "model"))
KEPT = []
"""Plans of models that later scenarios use as they are."""


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.down = torch.nn.Linear(24, 10)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 10))

    def forward(self, x):
        return self.down(self.norm(torch.nn.functional.gelu(self.up(x)))) * self.scale


def model():
    torch.manual_seed(0)
    return MLP()


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def loss_of(output, target):
    return torch.nn.functional.cross_entropy(output, target)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


def planned(optimizer=sgd, **options):
    program = capture(model(), batch(0), loss_fn=loss_of, optimizer=optimizer)
    plan = alternating(program, MESH, **options)
    KEPT.append(plan)
    return plan


def compiles():
    return metrics.counter_value("UncachedCompile") or 0


def eager(optimizer, steps=4):
    m = model()
    o = optimizer(m.parameters())
    losses = []
    for i in range(steps):
        x, y = batch(i)
        o.zero_grad()
        loss = loss_of(m(x), y)
        loss.backward()
        o.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in m.parameters()]


def difference(losses, parameters, m, optimizer):
    wanted, reference = eager(optimizer, len(losses))
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "parameters": max(
            float((a - b.detach().cpu()).abs().max()) for a, b in zip(reference, m.parameters(), strict=True)
        ),
    }


def applied(plan, optimizer=sgd):
    m = model()
    o = optimizer(m.parameters())
    plan.apply(m, o)
    return m, o


def step(m, o, x, y):
    o.zero_grad()
    loss = loss_of(m(x), y)
    loss.backward()
    o.step()
    return loss


def refusal(run):
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def not_as_planned(plan, m, loss):
    """Of a traced step that has not run: annotations that it lacks."""
    return lacking(plan, [loss.detach(), *m.parameters()])


def trains(optimizer, steps=4):
    """Steps on CPU batches that are moved inside the context."""
    plan = planned(optimizer)
    m = model()
    before = [id(p) for p in m.parameters()]
    o = optimizer(m.parameters())
    plan.apply(m, o)
    losses, compiled, schedule = [], [], torch.optim.lr_scheduler.StepLR(o, 100)
    for i in range(steps):
        x, y = batch(i)
        start = compiles()
        with plan.annotate():
            loss = step(m, o, x.to("xla"), y.to("xla"))
            schedule.step()
        missing = not_as_planned(plan, m, loss)
        torch_xla.sync()
        compiled.append(compiles() - start)
        losses.append(loss.item())
    weight = m.up.weight
    state = next(v for k, v in o.state[weight].items() if v.dim() == 2)
    return {
        **difference(losses, None, m, optimizer),
        "compiled": compiled,
        "lacking": missing,
        "otherwise": placed_otherwise(plan, m.named_parameters()),
        "same_objects": before == [id(p) for p in m.parameters()],
        "weight": X._get_xla_sharding_spec(weight),
        "state": X._get_xla_sharding_spec(state),
        "pins": sum(a.spec is not None for a in plan.activations),
        "copies": sum(len(a.copies) for a in plan.activations) + sum(len(t.copies) for t in plan.parameters.values()),
    }


def on_a_torus():
    """Three steps on devices that say that they are a v5e 2x4 slice, numbered with x fastest as libtpu does."""
    import torch_xla.runtime as xr

    attributes = [{"name": f"TPU:{i}", "coords": [i % 2, i // 2, 0], "core_on_chip": 0} for i in range(8)]
    known = xr.global_runtime_device_attributes
    xr.global_runtime_device_attributes = lambda: attributes
    try:
        program = capture(model(), batch(0), loss_fn=loss_of, optimizer=sgd)
        plan = alternating(program, Mesh((2, 4), ("data", "model"), "tpu-v5e"))
        m, o = applied(plan)
        losses = []
        for i in range(3):
            x, y = batch(i)
            with plan.annotate():
                loss = step(m, o, x.to("xla"), y.to("xla"))
            torch_xla.sync()
            losses.append(loss.item())
        text = annotated_program(plan, model(), batch(0), loss_fn=loss_of, optimizer=sgd)
    finally:
        xr.global_runtime_device_attributes = known
    KEPT.append(plan)
    sharding = X._get_xla_sharding_spec(m.up.weight)
    return {**difference(losses, None, m, sgd), "weight": sharding, "moved": b"0,2,4,6,1,3,5,7" in text}


class Branches(torch.nn.Module):
    """Two branches in an order that may differ from process to process, as that of a set."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.up = torch.nn.ModuleDict({"wide": torch.nn.Linear(16, 32), "narrow": torch.nn.Linear(16, 8)})
        self.down = torch.nn.ModuleDict({"wide": torch.nn.Linear(32, 10), "narrow": torch.nn.Linear(8, 10)})

    def forward(self, x):
        made = {name: torch.nn.functional.gelu(self.up[name](x * 2.0)) for name in self.order}
        return self.down["wide"](made["wide"]) + self.down["narrow"](made["narrow"])


def in_another_order():
    """A plan of a model whose ops run in another order where it is applied."""
    order = ("wide", "narrow")
    program = capture(Branches(order), batch(0), loss_fn=loss_of, optimizer=adamw)
    plan = alternating(program, MESH)
    KEPT.append(plan)
    m = Branches(order[::-1])
    o = adamw(m.parameters())
    wanted = capture(m, batch(0), loss_fn=loss_of, optimizer=adamw)
    assert wanted.fingerprint != program.fingerprint
    plan.check_program(wanted)
    plan.apply(m, o)
    alone = Branches(order)
    other = adamw(alone.parameters())
    losses, expected = [], []
    for i in range(3):
        x, y = batch(i)
        with plan.annotate():
            loss = step(m, o, x.to("xla"), y.to("xla"))
        missing = not_as_planned(plan, m, loss)
        torch_xla.sync()
        losses.append(loss.item())
        expected.append(step(alone, other, x, y).item())
    text = annotated_program(plan, Branches(order[::-1]), batch(0), loss_fn=loss_of, optimizer=adamw)
    here = annotated_program(plan, Branches(order), batch(0), loss_fn=loss_of, optimizer=adamw)
    del m, o, loss
    gc.collect()  # what a sync would run beside another scenario's tensors, which lie on devices in another order
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "lacking": missing,
        "annotated": text != here and bytes.count(text, b"devices=") == bytes.count(here, b"devices="),
    }


def in_torch_xla_compile():
    plan = planned()
    m, o = applied(plan)

    def one(x, y):
        with plan.annotate():
            loss = step(m, o, x, y).detach()
        missing.append(not_as_planned(plan, m, loss))
        return loss

    compiled = torch_xla.compile(one, full_graph=True)
    losses, counts, missing = [], [], []
    for i in range(4):
        x, y = (t.to("xla") for t in batch(i))
        torch_xla.sync()
        start = compiles()
        loss = compiled(x, y)
        counts.append(compiles() - start)
        losses.append(loss.item())
    otherwise = placed_otherwise(plan, m.named_parameters())
    return {**difference(losses, None, m, sgd), "compiled": counts, "lacking": max(missing), "otherwise": otherwise}


def from_a_loader():
    import torch_xla.distributed.parallel_loader as parallel

    plan = planned()
    m, o = applied(plan)
    data = [dict(zip(("x", "target"), batch(i), strict=True)) for i in range(4)]
    shardings = input_shardings(plan)
    loader = parallel.MpDeviceLoader(data, torch_xla.device(), input_sharding=shardings)
    losses, shards = [], []
    for each in loader:
        shards.append(X._get_xla_sharding_spec(each["x"]))
        with plan.annotate():
            loss = step(m, o, each["x"], each["target"])
        missing = not_as_planned(plan, m, loss)
        torch_xla.sync()
        losses.append(loss.item())
    return {
        **difference(losses, None, m, sgd),
        "inputs": shards,
        "names": sorted(shardings),
        "lacking": missing,
        "otherwise": placed_otherwise(plan, m.named_parameters()),
        "inputs_otherwise": placed_otherwise(plan, [("x", each["x"]), ("target", each["target"])]),
    }


def whole_loop_in_one_context():
    """Several steps, with a running loss and its value, in one context; batches already on the device."""
    plan = planned()
    m, o = applied(plan)
    losses, running = [], 0.0
    batches = [[t.to("xla") for t in batch(i)] for i in range(3)]
    with plan.annotate():
        for x, y in batches:
            loss = step(m, o, x, y)
            running = running + loss.detach()
            missing = not_as_planned(plan, m, loss)
            torch_xla.sync()
            losses.append(loss.item())
    return {**difference(losses, None, m, sgd), "running": abs(running.item() - sum(losses)), "lacking": missing}


def other_programs():
    plan = planned(adamw)
    m, o = applied(plan, adamw)
    x, y = (t.to("xla") for t in batch(0))
    with plan.annotate():
        step(m, o, x, y)
    torch_xla.sync()
    kept = copy.deepcopy([p.detach().cpu() for p in m.parameters()])
    states = copy.deepcopy({k: v.cpu() for k, v in o.state[m.down.weight].items()})

    def extra_op():
        with plan.annotate():
            loss_of(m(x + 1), y)

    def other_loss():
        with plan.annotate():
            o.zero_grad()
            torch.nn.functional.mse_loss(m(x), x[:, :10]).backward()

    def stops_early():
        with plan.annotate():
            loss_of(m(x), y)

    def other_batch():
        with plan.annotate():
            m(torch.ones(4, 16).to("xla"))

    def on_the_host():
        with plan.annotate():
            loss_of(m(x), torch.zeros(8, dtype=torch.long)).backward()

    def swapped():
        with plan.annotate():
            o.zero_grad()
            loss_of(m(x), y).backward()
            first, last = m.norm.weight.grad, m.norm.bias.grad
            m.norm.weight.grad, m.norm.bias.grad = last, first
            o.step()

    def other_optimizer():
        with plan.annotate():
            o.zero_grad()
            loss_of(m(x), y).backward()
            o.param_groups[0]["weight_decay"] = 0.0
            try:
                o.step()
            finally:
                o.param_groups[0]["weight_decay"] = 1e-2

    def half_a_step():
        with plan.annotate():
            o.zero_grad()
            loss_of(m(x), y).backward()
            last = o.param_groups[0]["params"].pop()
            try:
                o.step()
            finally:
                o.param_groups[0]["params"].append(last)

    def second_backward():
        with plan.annotate():
            loss = step(m, o, x, y)
            (loss * 2).backward()

    def second_step():
        with plan.annotate():
            step(m, o, x, y)
            o.step()

    found = {}
    cases = (
        extra_op, other_loss, stops_early, other_batch, on_the_host, swapped, other_optimizer, half_a_step,
        second_backward, second_step,
    )  # fmt: skip
    for case in cases:
        start = compiles()
        o.zero_grad()
        text = refusal(case)
        torch_xla.sync()
        found[case.__name__] = {
            "error": text,
            "parameters": max(
                float((a - p.detach().cpu()).abs().max()) for a, p in zip(kept, m.parameters(), strict=True)
            ),
            "states": max(float((v - o.state[m.down.weight][k].cpu()).abs().max()) for k, v in states.items()),
            "gradients": sum(p.grad is not None for p in m.parameters()),
            "compiled": compiles() - start,
        }
    with plan.annotate():
        loss = step(m, o, *(t.to("xla") for t in batch(1)))
    torch_xla.sync()
    wanted, _ = eager(adamw, 2)
    found["afterwards"] = abs(loss.item() - wanted[1]) / wanted[1]
    return found


def unfit():
    plan = planned()

    def other_mesh(shape):
        program = capture(model(), batch(0), loss_fn=loss_of, optimizer=sgd)
        m = model()
        alternating(program, Mesh(shape, ("data", "model"))).apply(m, sgd(m.parameters()))

    def on_meta():
        with torch.device("meta"):
            m = MLP()
        plan.apply(m, sgd(m.parameters()))

    def another_model():
        m = torch.nn.Linear(16, 10)
        plan.apply(m, sgd(m.parameters()))

    def wider():
        m = model()
        m.up = torch.nn.Linear(16, 25)
        plan.apply(m, sgd(m.parameters()))

    def another_optimizer():
        m = model()
        plan.apply(m, adamw(m.parameters()))

    def no_optimizer():
        plan.apply(model())

    def not_applied():
        fresh = planned()
        with fresh.annotate():
            pass

    def inside_itself():
        m, o = applied(plan)
        with plan.annotate(), plan.annotate():
            step(m, o, *(t.to("xla") for t in batch(0)))

    def inside_another():
        m, o = applied(plan)
        other = planned()
        applied(other)
        with plan.annotate(), other.annotate():
            step(m, o, *(t.to("xla") for t in batch(0)))

    cases = (on_meta, another_model, wider, another_optimizer, no_optimizer, not_applied, inside_itself, inside_another)
    found = {case.__name__: refusal(case) for case in cases}
    found["larger_mesh"] = refusal(lambda: other_mesh((4, 4)))
    found["smaller_mesh"] = refusal(lambda: other_mesh((2, 2)))
    return found


def resumed():
    """State that an optimizer has already is moved as it is: two eager steps, then two under the plan."""
    m = model()
    o = sgd(m.parameters())
    losses = [step(m, o, *batch(i)).item() for i in range(2)]
    o.zero_grad()
    plan = planned()
    plan.apply(m, o)
    for i in range(2, 4):
        with plan.annotate():
            loss = step(m, o, *(t.to("xla") for t in batch(i)))
        missing = not_as_planned(plan, m, loss)
        torch_xla.sync()
        losses.append(loss.item())
    otherwise = placed_otherwise(plan, m.named_parameters())
    return {**difference(losses, None, m, sgd), "lacking": missing, "otherwise": otherwise}


def traced():
    program = capture(model(), batch(0), loss_fn=loss_of, optimizer=sgd)
    plan = alternating(program, MESH)
    annotated = annotated_program(plan, model(), batch(0), loss_fn=loss_of, optimizer=sgd)
    other = refusal(lambda: annotated_program(plan, model(), batch(0), loss_fn=loss_of, optimizer=adamw))
    from autoshard.stablehlo.context import mlir_context
    from autoshard.stablehlo.reader import parse_module

    with mlir_context():
        text = str(parse_module(annotated))
    arguments = text[text.index("@main(") : text.index("->", text.index("@main("))]
    return {
        "sharded_arguments": arguments.count("mhlo.sharding"),
        "planned_arguments": sum(len(getattr(plan, s)) for s in ("parameters", "buffers", "inputs", "optimizer_state")),
        "annotations": text.count("@Sharding"),
        "written": sum(a.spec is not None for a in plan.activations),
        "other": other,
    }


SCENARIOS = {
    "sgd": lambda: trains(sgd),
    "adamw": lambda: trains(adamw),
    "adamw_foreach": lambda: trains(lambda p: adamw(p, foreach=True)),
    "radam": lambda: trains(lambda p: torch.optim.RAdam(p, lr=1e-3), steps=8),
    "dampened": lambda: trains(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)),
    "torch_xla_compile": in_torch_xla_compile,
    "loader": from_a_loader,
    "one_context": whole_loop_in_one_context,
    "resumed": resumed,
    "other_programs": other_programs,
    "another_order": in_another_order,
    "torus": on_a_torus,
    "unfit": unfit,
    "traced": traced,
}

if __name__ == "__main__":
    import traceback

    found = {}
    for name, scenario in SCENARIOS.items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        try:
            found[name] = scenario()
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    with open(sys.argv[1], "w") as out:
        json.dump(found, out)
