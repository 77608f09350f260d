"""What `tests/auto/test_policy.py` asserts on: training loops under the automatic mode, on eight virtual devices.

python -m tests.lower.torch_xla.auto_eight_devices OUT.json
"""

import copy
import os
import time
import warnings

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"

import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module

import autoshard
from autoshard import api
from autoshard.auto import policy as auto
from autoshard.errors import LoweringError
from tests.lower.torch_xla import scenarios
from tests.lower.torch_xla.annotations_traced import lacking, placed_otherwise

ROWS, STEPS = 16, 4
HINTS = {"up.weight": "[model],[]", "x": "[data],[]"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 128)
        self.norm = torch.nn.LayerNorm(128)
        self.down = torch.nn.Linear(128, 32)

    def forward(self, x, scale=1.0):
        return self.down(torch.nn.functional.gelu(self.norm(self.up(x)))) * scale


class Recurrent(Net):
    """Its recurrent module holds weak references to its weights."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(32, 32, batch_first=True)

    def forward(self, x, scale=1.0):
        return super().forward(self.lstm(x.unsqueeze(1).repeat(1, 3, 1))[0][:, -1], scale)


class Positioned(Net):
    """Its positions are a buffer, of which a part that is no multiple of the devices is looked up."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 32)
        self.register_buffer("positions", torch.arange(32))

    def forward(self, x, scale=1.0):
        return super().forward(x + self.table(self.positions[:12]).mean(0), scale)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mean_square(model, out, y):
    """A loss that is written out, with a term over a weight."""
    return ((out - y) ** 2).mean() + 1e-3 * model.up.weight.square().sum()


def module_loss(model, out, y):
    return torch.nn.MSELoss()(out, y)


def sharding(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(getattr(tensor, "global_tensor", tensor))


def compiled():
    return int(metrics.counter_value("UncachedCompile") or 0)


def spmd(model, **options):
    autoshard.use_spmd(auto=True, spmd_config={"auto_sharding": {"mesh": "2x4", **options}})
    return model.to("xla")


def policy(model, **options):
    mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("data", "model"))
    return distribute_module(model, mesh, autoshard.auto_policy)


def trained(
    place, loss_of=mean_square, optimizer_of=sgd, accumulate=1, odd_batch=False, clip=False, net=Net, **options
):
    torch.manual_seed(0)
    model = net()
    reference = copy.deepcopy(model)
    auto._LAST = None
    model = place(model, **options)
    at_once = sharding(model.up.weight)
    optimizer, theirs = optimizer_of(model.parameters()), optimizer_of(reference.parameters())
    losses, plans, compiles, missing = [], [], [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(STEPS):
            before = compiled()
            for _ in range(accumulate):
                rows = ROWS // 2 if odd_batch and number == 2 else ROWS
                x, y = torch.randn(rows, 32), torch.randn(rows, 32)
                out = model(x.to("xla"), scale=0.5)
                loss = loss_of(model, out, y.to("xla"))
                loss.backward()
                wanted = loss_of(reference, reference(x, scale=0.5), y)
                wanted.backward()
            if clip:
                for net in (model, reference):
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            planned_before = auto.current_plan()
            optimizer.step()
            optimizer.zero_grad()
            if planned_before is not None and rows == ROWS:
                missing.append(lacking(planned_before, [loss.detach(), *model.parameters()]))
            torch_xla.sync()
            theirs.step()
            theirs.zero_grad()
            losses.append(abs(loss.item() - wanted.item()) / abs(wanted.item()))
            plans.append(auto.current_plan() is not None)
            compiles.append(compiled() - before)
    model.eval()
    with torch.no_grad():
        evaluated = (model(x.to("xla")).cpu() - reference(x)).abs().max().item()
    plan = auto.current_plan()
    return {
        "losses": max(losses),
        "parameters": max(
            (a.detach().cpu() - b.detach()).abs().max().item()
            for a, b in zip(model.parameters(), reference.parameters(), strict=True)
        ),
        "evaluated": evaluated,
        "at_once": at_once,
        "sharding": sharding(model.up.weight),
        "planned": None if plan is None else plan.parameters["up.weight"].spec,
        "mesh": None if plan is None else plan.mesh.shape,
        "plans": plans,
        "lacking": missing,
        "otherwise": None if plan is None else placed_otherwise(plan, model.named_parameters()),
        "compiles": compiles,
        "warnings": [str(each.message) for each in said if "autoshard" in str(each.message)],
    }


def cached():
    """Two runs of one training script: the second finds its plan."""
    made = []
    plan_program = api.plan_program

    def counted(*arguments, **options):
        made.append(1)
        return plan_program(*arguments, **options)

    api.plan_program = counted
    try:
        runs = []
        for _ in range(2):
            start = time.process_time()
            runs.append(trained(spmd, hints=HINTS))
            runs[-1]["cpu"] = time.process_time() - start
    finally:
        api.plan_program = plan_program
    return {**runs[1], "made": len(made), "same": runs[0]["sharding"] == runs[1]["sharding"]}


def stale():
    """An optimizer of the parameters that the model had before it was moved."""
    model = Net()
    optimizer = sgd(model.parameters())
    model = spmd(model)
    auto._LAST = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            x = torch.randn(ROWS, 32).to("xla")
            mean_square(model, model(x), x).backward()
            optimizer.step()
            torch_xla.sync()
    return {"warnings": [str(each.message) for each in said if "autoshard" in str(each.message)]}


def small_mesh():
    """A mesh of fewer devices than there are."""
    model = spmd(Net(), mesh="2x2")
    try:
        model(torch.randn(ROWS, 32).to("xla"))
    except auto.AutoShardingError as error:
        return {"said": str(error), "sharding": sharding(model.up.weight)}
    return {"said": None}


def after_a_step():
    """A model that ran with gradients, its loss alive: refused by name; trained on once that is deleted."""
    held = []

    def ran(model):
        x = torch.randn(ROWS, 32)
        loss = mean_square(model, model(x), x)
        loss.backward()
        held.append(mean_square(model, model(x), x))
        try:
            policy(model)
        except LoweringError as error:
            held[:] = [str(error)]
        return policy(model)

    return {**trained(ran), "said": held[0]}


SCENARIOS = {
    "spmd": lambda: trained(spmd, hints=HINTS),
    "policy": lambda: trained(policy),
    "policy_recurrent": lambda: trained(policy, net=Recurrent),
    "positions": lambda: trained(spmd, net=Positioned, hints=HINTS),
    "module_loss": lambda: trained(spmd, loss_of=module_loss, hints=HINTS),
    "every_mesh": lambda: trained(spmd, mesh=None),
    "accumulation": lambda: trained(spmd, accumulate=2, hints=HINTS),
    "clipping": lambda: trained(spmd, clip=True, hints=HINTS),
    "odd_batch": lambda: trained(spmd, odd_batch=True, hints=HINTS),
    "stale": stale,
    "small_mesh": small_mesh,
    "cached": cached,
    "after_a_step": after_a_step,
}


if __name__ == "__main__":
    scenarios.main(SCENARIOS)
