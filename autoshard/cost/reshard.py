"""Resharding (being built)."""

from __future__ import annotations

from autoshard.mesh import Mesh, Spec


def encode_pair(src: Spec, dst: Spec, mesh: Mesh) -> str:
    """`0,1>.,01`: per dim the positions of its axes in the mesh, `.` for none."""

    def encode(spec: Spec) -> str:
        return ",".join("".join(str(mesh.axis_names.index(axis)) for axis in dim) or "." for dim in spec)

    return f"{encode(src)}>{encode(dst)}"


def inert_dims_dropped(src: Spec, dst: Spec) -> tuple[Spec, Spec]:
    """The pair without the dims that neither spec splits."""
    kept = [i for i in range(len(src)) if src[i] or dst[i]]
    return tuple(src[i] for i in kept), tuple(dst[i] for i in kept)


def encode_axes(axes: tuple[str, ...], mesh: Mesh) -> str:
    return "".join(axis.replace(axis.partition("[")[0], "".join(str(mesh.axis_names.index(a)) for a in axis.partition("[")[0].split("~"))) for axis in axes)
