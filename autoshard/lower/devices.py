"""Which device of a runtime stands at which place of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.cost.machine.device import DeviceError, load_device, split_topology
from autoshard.cost.machine.layout import device_order
from autoshard.mesh import Mesh


def device_ids(mesh: Mesh, attributes: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """For each place of the mesh, row-major, the id of the runtime's device that stands there.

    A TPU runtime numbers its devices in an order of its own (x fastest), so that neighbours of a mesh axis need not be
    neighbours on the torus. By their coordinates they are put where the plan was priced, and compiled for when it was
    verified: `cost/machine/layout.py`.

    Args:
        attributes: per device as torch_xla says them: `name` (`TPU:3`), and on TPU `coords`, `core_on_chip`,
            `slice_index`. Without coordinates ids are in order.
    """
    if len(attributes) != mesh.size or not all("coords" in each for each in attributes):
        return tuple(range(mesh.size))
    places = {
        int(each["name"].rpartition(":")[2]): (
            int(each.get("slice_index") or 0),
            *(int(number) for number in each["coords"]),
            int(each.get("core_on_chip") or 0),
        )
        for each in attributes
    }
    by_place = sorted(places, key=lambda number: places[number])
    device = load_device(mesh.device)
    slices, *shape = (len({place[i] for place in places.values()}) for i in range(4))
    kind = split_topology(mesh.device)[0]
    text = f"{kind}:{'x'.join(map(str, shape[: device.links[0].dims]))}" + (f":{slices}slices" if slices > 1 else "")
    try:
        attached = load_device(text)
        order = device_order(replace(mesh, device=text), attached)
    except DeviceError:  # not a torus that the plan's kind can be: the order of the coordinates
        order = tuple(range(mesh.size))
    return tuple(by_place[rank] for rank in order)
