"""Device meshes, and how a tensor is split over one.

An *axis* is a mesh axis, a *dim* is a tensor dimension.

A spec gives, for each dim of a tensor, the axes that split it, major to minor:
`(("data",), ("model",))` on a mesh `data=2, model=4` splits rows two ways and columns four ways;
`(("data", "model"), ())` splits rows eight ways, with the data axis major;
`((), ())` replicates the tensor.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class AxisPart:
    """The span of device groups that is not a full axis; sorted as text.

    Attributes:
        axes: the axis; or, for groups off the mesh's grid, all axes that they span, in mesh order.
        size: devices of a group along them.
        of: devices along the axis; None for groups off the grid.
    """

    axes: tuple[str, ...]
    size: int
    of: int | None = None

    def __str__(self) -> str:
        """`model[2/4]`, or `data~model[2]` for groups off the mesh's grid."""
        return f"{'~'.join(self.axes)}[{self.size}{'' if self.of is None else f'/{self.of}'}]"

    def __lt__(self, other: object) -> bool:
        """Order as text, also against names of axes."""
        return str(self) < str(other)

    def __gt__(self, other: object) -> bool:
        """Order as text, also against names of axes."""
        return str(self) > str(other)


AxisGroup = tuple[str | AxisPart, ...]
"""The axes that device groups span, in mesh order: names of full ones, and parts."""


def part_of(axis: str, size: int, of: int) -> str | AxisPart:
    """A group of `size` of the `of` devices along `axis`, as a member of an axis group."""
    return axis if size == of else AxisPart((axis,), size, of)


def parse_axes(names: Iterable[str]) -> AxisGroup:
    """Parse an axis group from the `str` of its members, as in plans and reports."""
    found = ((name, re.fullmatch(r"(.+)\[(\d+)(?:/(\d+))?\]", name)) for name in names)
    return tuple(
        AxisPart(tuple(part[1].split("~")), int(part[2]), int(part[3]) if part[3] else None) if part else name
        for name, part in found
    )


MAX_AXES = 4
MAX_DEVICES = 2**20
"""More than any machine has: a larger mesh is a typo, and enumerating its shapes would take too long."""


def replicated(rank: int) -> Spec:
    """The spec that splits no dim of a tensor of this rank."""
    return ((),) * rank


def spec_axes(spec: Spec) -> frozenset[str]:
    """Every axis that splits some dim."""
    return frozenset(axis for dim in spec for axis in dim)


def format_spec(spec: Spec) -> str:
    """`[data],[]`, the command line's form of hints."""
    return ",".join(f"[{','.join(dim)}]" for dim in spec)


def parse_spec(text: str) -> Spec:
    """The inverse of `format_spec`; `[a+b],[]` and `[a,b],[]` are both two axes on one dim.

    Raises ValueError when `text` is not a list of bracketed axis lists.
    """
    if not re.fullmatch(r"\s*(\[[^\[\]]*\]\s*(,\s*\[[^\[\]]*\]\s*)*)?", text):
        raise ValueError(f"a spec is one bracketed axis list per dim, such as [data],[], not {text!r}")
    dims = re.findall(r"\[([^\]]*)\]", text)
    return tuple(tuple(axis for axis in re.split(r"[,+\s]+", dim) if axis) for dim in dims)


def as_spec(value: Sequence[Iterable[str] | str | None]) -> Spec:
    """A spec from JSON lists or from torch_xla / jax style partition specs (`None`, `"data"`, `("x", "y")`).

    Raises ValueError for anything else.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _no_spec(value)
    return tuple(() if dim is None else (dim,) if isinstance(dim, str) else _axes(dim, value) for dim in value)


def _axes(dim: Iterable[str], spec: object) -> tuple[str, ...]:
    if not isinstance(dim, Iterable):
        raise _no_spec(spec)
    axes = tuple(dim)
    if not all(isinstance(axis, str) for axis in axes):
        raise _no_spec(spec)
    return axes


def _no_spec(value: object) -> ValueError:
    return ValueError(f"a spec has None, an axis or several axes per dim, such as ('data', None), not {value!r}")


@dataclass(frozen=True)
class Mesh:
    """Devices in a row-major grid of named axes.

    Attributes:
        shape: devices along each axis; one to four axes.
        axis_names: one distinct name per axis.
        device: a device kind of `cost/machine/devices.toml`, such as `tpu-v5e`, or one with the topology that the
            devices stand in: `tpu-v5e:4x4:2slices` (chips per torus dim, slices), `h100:2x8` (hosts x GPUs per host).
        placement: per axis its link, a link name of that device kind (`ici`, `nvlink`, `dcn`…), or two, as in
            `nvlink+ib`, for an axis that continues over the second; empty assigns inner axes to fast links (see
            `cost.machine.device.default_placement`).

    Raises:
        ValueError: clashing or missing names, sizes below one, or more than four axes.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()
    device: str = "cpu"
    placement: tuple[str, ...] = ()
    _sizes: Mapping[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        """Validate and complete the fields."""
        try:
            shape = tuple(operator.index(size) for size in self.shape)
        except TypeError:
            raise ValueError(f"a mesh shape is whole numbers, such as (2, 4), not {self.shape!r}") from None
        names = tuple(self.axis_names) or default_axis_names(len(shape))
        if not 1 <= len(shape) <= MAX_AXES:
            raise ValueError(f"a mesh has one to four axes, not {len(shape)} (shape {shape})")
        if any(size < 1 for size in shape):
            raise ValueError(f"every axis of a mesh needs at least one device: shape {shape}")
        if math.prod(shape) > MAX_DEVICES:
            raise ValueError(f"a mesh has at most {MAX_DEVICES:,} devices, not {math.prod(shape):,} (shape {shape})")
        if len(names) != len(shape):
            raise ValueError(f"mesh shape {shape} has {len(shape)} axes but {len(names)} names: {', '.join(names)}")
        clash = sorted({name for name in names if names.count(name) > 1})
        if clash:
            raise ValueError(f"mesh axis names must differ: {', '.join(clash)} is used more than once")
        bad = [name for name in names if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
        if bad:
            raise ValueError(f"a mesh axis name is letters, digits and underscores, not {bad[0]!r}")
        if self.placement and len(self.placement) != len(shape):
            raise ValueError(f"placement names a link per axis: {len(shape)} axes, {len(self.placement)} links")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "_sizes", dict(zip(names, shape, strict=True)))

    @classmethod
    def parse(cls, text: str, axes: str | None = None, device: str = "cpu", placement: str | None = None) -> Mesh:
        """Parse the command line's `2x4`, `data,model` and `dcn,ici`."""
        if not re.fullmatch(r"\d+(x\d+)*", text):
            raise ValueError(f"a mesh shape is numbers joined by x, such as 2x4, not {text!r}")
        names = tuple(name.strip() for name in axes.split(",")) if axes else ()
        links = tuple(name.strip() for name in placement.split(",")) if placement else ()
        return cls(tuple(int(size) for size in text.split("x")), names, device, links)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def axis_size(self, axis: str) -> int:
        """Devices along `axis`."""
        return self._sizes[axis]

    def ways(self, axes: Iterable[str]) -> int:
        """Number of parts of a dim split by `axes`."""
        return math.prod(self._sizes[axis] for axis in axes)

    def group_size(self, axes: AxisGroup) -> int:
        """Size of device groups over `axes`."""
        return math.prod(self._sizes[axis] if isinstance(axis, str) else axis.size for axis in axes)

    def spanned(self, axes: AxisGroup) -> tuple[str, ...]:
        """The full axes that `axes` or parts of them belong to, in mesh order."""
        return self.in_order(name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis.axes))

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of more than one device."""
        return tuple(name for name in self.axis_names if self._sizes[name] > 1)

    def in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` in the order of the mesh."""
        wanted = set(axes)
        return tuple(name for name in self.axis_names if name in wanted)

    def shard_shape(self, shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
        """Shape of one device's shard of a tensor of `shape`; uneven dims are padded up."""
        return tuple(-(-size // self.ways(axes)) for size, axes in zip(shape, spec, strict=True))

    def check(self, spec: Spec, shape: Sequence[int], what: str) -> None:
        """Raise ValueError, naming `what`, unless `spec` fits a tensor of `shape` on this mesh."""
        if len(spec) != len(shape):
            raise ValueError(f"{what} has {len(shape)} dims, but the spec {format_spec(spec)} has {len(spec)}")
        seen: set[str] = set()
        for axis in (axis for dim in spec for axis in dim):
            if axis not in self._sizes:
                raise ValueError(f"{what}: no mesh axis is called {axis!r}; the mesh has {', '.join(self.axis_names)}")
            if axis in seen:
                raise ValueError(f"{what}: axis {axis!r} appears twice in the spec {format_spec(spec)}")
            seen.add(axis)


def orders(axes: Sequence[str], split: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """The orders, major to minor, in which plans let `axes` split one dim, of a mesh whose axes are `split`.

    All, of up to three axes. Four are planned for as people order them: only neighbours share a dim, in the mesh's
    order, which bounds the number of specs (163 of a tensor of three dims; 685 with all orders).
    """
    if len(split) < MAX_AXES:
        return itertools.permutations(axes)
    places = sorted(map(split.index, axes))
    together = places == list(range(places[0], places[0] + len(places))) if places else True
    return [tuple(split[place] for place in places)] if together else []


def default_axis_names(rank: int) -> tuple[str, ...]:
    """Default axis names: `data`, `model`, `z`, `w`, as many as there are axes."""
    return ("data", "model", "z", "w")[:rank]


def describe_mesh(mesh: Mesh, links: Sequence[str] = ()) -> str:
    """`2x4 (data=2, model=4) of tpu-v5e`; with the link of each axis, `(data=2 on ib, model=4 on nvlink)`."""
    on = [f" on {link}" for link in links] or [""] * len(mesh.shape)
    axes = ", ".join(f"{name}={size}{link}" for name, size, link in zip(mesh.axis_names, mesh.shape, on, strict=True))
    return f"{'x'.join(map(str, mesh.shape))} ({axes}) of {mesh.device}"
