"""Which of a plan's annotations are in the program that torch_xla has traced of a running step, and not run yet."""

import re
from collections import Counter

import torch_xla

from autoshard.lower.torch_xla import runtime
from autoshard.lower.torch_xla.schedule import Schedule
from autoshard.planning.hints import _tiles
from autoshard.stablehlo.annotate import gspmd_sharding

_CUSTOM_CALL = re.compile(r'custom_call_target="Sharding".*?sharding=(\{[^}]*\})')


def lacking(plan, tensors):
    """How many annotations the plan has on values and copies that the program of `tensors` has not.

    Call it at the end of a step, before anything runs it. The steps of an optimizer are in the program of what it
    updates.
    """
    schedule = Schedule.of(plan)
    specs = [*schedule.pins.values(), *(chain[-1] for _, chain in schedule.last_read)]
    wanted = Counter(_tiles(gspmd_sharding(spec, plan.mesh)) for spec in specs)
    text = torch_xla._XLAC._get_xla_tensors_hlo([runtime.plain(each) for each in tensors])
    found = Counter(map(_tiles, _CUSTOM_CALL.findall(text)))
    return (wanted - found).total()


def placed_otherwise(plan, named):
    """Names of tensors on the device that do not lie as the plan says."""

    def tiles(tensor):
        return _tiles(torch_xla._XLAC._get_xla_sharding_spec(runtime.plain(tensor)) or "{replicated}")

    sections = (plan.parameters, plan.buffers, plan.inputs, plan.optimizer_state)
    specs = {name: each.spec for section in sections for name, each in section.items()}
    return [name for name, tensor in named if tiles(tensor) != _tiles(gspmd_sharding(specs[name], plan.mesh))]
