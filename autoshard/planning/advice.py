"""What would fit, where no plan does: estimates that a message gives."""

from __future__ import annotations

import math

from autoshard.dtypes import dtype_bytes
from autoshard.graph.ops import Graph
from autoshard.mesh import Mesh

_KEPT = ("parameter", "buffer", "optimizer_state")


def what_would_fit(graph: Graph, mesh: Mesh, limit: float, least: float) -> str:
    """More devices, or a smaller batch, each with its figure.

    Args:
        limit: bytes per device that there are.
        least: bytes per device of the smallest plan that was found.
    """
    types = (each.type for each in graph.program.arguments if each.role in _KEPT)
    state = sum(math.prod(each.shape) * dtype_bytes(each.dtype) for each in types) / mesh.size
    said = [f"{math.ceil(mesh.size * least / limit)} devices, if all is split over them"]
    if state < limit:
        share = math.ceil((least - state) / (limit - state))
        said.append(
            f"1/{share} of the batch, or as many micro-batches ({state:,.0f} bytes are parameters, buffers and "
            "optimizer state in equal parts)"
        )
    if graph.program.kind == "train" and not any("remat:" in name for name in graph.program.switches):
        said.append("remat='auto' (--remat auto), which recomputes what blocks of a model do not keep")
    return f"By estimate these would fit: {'; '.join(said)}"
