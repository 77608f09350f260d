"""Maps mesh positions to a runtime's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.cost.machine.device import DeviceError, load_device, split_topology
from autoshard.cost.machine.layout import device_order
from autoshard.mesh import Mesh


def device_ids(mesh: Mesh, attributes: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The runtime's device id for each mesh position, row-major.

    A TPU runtime numbers devices x fastest, so neighbours on a mesh axis need not be neighbours on the torus.
    Coordinates restore the layout that the cost model and `verify` assume (`cost/machine/layout.py`).

    Args:
        attributes: of each device in torch_xla's form: `name` (`TPU:3`), and on TPU `coords`, `core_on_chip`,
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
    except DeviceError:  # not a torus of the plan's device kind: use the order of the coordinates
        order = tuple(range(mesh.size))
    return tuple(by_place[rank] for rank in order)
