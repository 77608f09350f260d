"""DTensor hooks at module boundaries: they redistribute inputs, outputs and parameters.

Attention and recurrent modules, inside which DTensor has no rules, run with replicated weights, split along the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from autoshard.frontends.tracing.device import tensor_type
from autoshard.lower.module_values import BorderValue
from autoshard.mesh import Mesh, Spec

PlacementTuple = tuple[Placement, ...]


def placements(mesh: Mesh, spec: Spec) -> PlacementTuple:
    """DTensor placements of a spec, per mesh axis. Axes on one dim split it in mesh order."""
    dims = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
    return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in mesh.axis_names)


class _Placed(torch.autograd.Function):  # type: ignore[misc]
    """Redistributes a DTensor; its gradient returns in the original placements, reduced.

    `DTensor.redistribute` (torch 2.9) treats the partial gradient of a partial tensor as replicated: earlier parameters
    would get a part of their gradients.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placements: PlacementTuple) -> DTensor:
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
        return tensor.redistribute(placements=placements)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return placed(gradient, ctx.placements), None


def placed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """`DTensor.redistribute` with the gradient of one process."""
    wanted = tuple(placements)
    return tensor if tensor.placements == wanted else _Placed.apply(tensor, wanted)  # type: ignore[no-untyped-call]


class Border:
    """Hooks that redistribute a module's inputs and outputs, and the parameters that it reads."""

    def __init__(
        self,
        mesh: Mesh,
        device_mesh: DeviceMesh,
        inputs: Sequence[BorderValue],
        outputs: Sequence[BorderValue],
        reads: Mapping[str, PlacementTuple],
    ) -> None:
        """Hooks of a module of a plan on `mesh`, realised as `device_mesh`."""
        self.mesh, self.device_mesh = mesh, device_mesh
        self.inputs, self.outputs, self.reads = inputs, outputs, reads
        self.kept: list[dict[str, Any]] = []

    def install(self, module: torch.nn.Module) -> None:
        """Hook the module."""
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Redistribute inputs and parameters."""
        own: dict[str, Any] = {}
        for name in self.reads:
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            for table in (owner._parameters, owner._buffers):
                if table.get(key) is not None:
                    own[name] = table, key, table[key]
        self.kept.append(own)
        for name, (table, key, tensor) in own.items():
            table[key] = placed(tensor, self.reads[name])
        return self.as_planned(self.inputs, (args, kwargs))  # type: ignore[no-any-return]

    def after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Restore the parameters, and redistribute outputs."""
        for table, key, tensor in (self.kept.pop() if self.kept else {}).values():
            table[key] = tensor
        made = self.as_planned(self.outputs, output)
        # Reduce the partial result of a lookup in a split table once, not in each of its readers.
        return tree_map(reduced, made) if isinstance(module, torch.nn.Embedding) else made

    def as_planned(self, values: Sequence[BorderValue], tree: Any) -> Any:
        """Redistribute the tensors of a tree that match a planned value by shape and dtype."""
        wanted = {(value.shape, value.dtype): value.spec for value in values}

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            kind = tensor_type(leaf)
            spec = wanted.get((kind.shape, kind.dtype))
            return leaf if spec is None else placed(leaf, placements(self.mesh, spec))

        return tree_map(one, tree) if wanted else tree


class Attention(Border):
    """Hooks of `torch.nn.MultiheadAttention`, which runs split along the batch alone, with replicated weights.

    Its views, which split the packed projection and merge batch and heads, have no placements in DTensor.
    """

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Redistribute inputs and parameters."""
        args, kwargs = super().before(module, args, kwargs)
        query = kwargs["query"] if "query" in kwargs else args[0]
        batch = (0 if module.batch_first else 1) if query.ndim == 3 else None
        kept: PlacementTuple = (Replicate(),) * self.device_mesh.ndim
        if isinstance(query, DTensor):
            kept = tuple(p if p == Shard(batch) else Replicate() for p in query.placements)
        whole = (Replicate(),) * len(kept)
        known: dict[int, Any] = {}  # whether query, key and value are one tensor decides how they are projected

        def once(leaf: Any, wanted: PlacementTuple) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) not in known:
                known[id(leaf)] = placed(leaf, wanted)
            return known[id(leaf)]

        read = [once(leaf, kept if i < 3 else whole) for i, leaf in enumerate(args)]
        named = {n: once(leaf, kept if n in ("query", "key", "value") else whole) for n, leaf in kwargs.items()}
        return tuple(read), named


class Recurrent(Border):
    """Hooks of LSTM, GRU and RNN, whose loop is one op of torch, without a rule in DTensor.

    Each process runs it on its shard of the batch with replicated weights, whose gradients are reduced.
    """

    def __init__(self, *what: Any) -> None:
        """Hooks of a module of the plan."""
        super().__init__(*what)
        self.running: list[tuple[Any, PlacementTuple, Any]] = []

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Redistribute inputs and parameters."""
        args, kwargs = super().before(module, args, kwargs)
        given = kwargs["input"] if "input" in kwargs else args[0]
        packed = isinstance(given, PackedSequence)  # its rows are not a batch
        batched = not packed and given.ndim == 3
        batch = _batch(module) if batched else None
        split = tuple(isinstance(given, DTensor) and p == Shard(batch) for p in getattr(given, "placements", ()))
        split = split or (False,) * self.device_mesh.ndim
        along = _along(split, batch)

        def local(leaf: Any, placements: PlacementTuple) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            return placed(leaf, placements).to_local(grad_placements=placements)

        def named(name: str, value: Any) -> Any:
            wanted = along if name == "input" else _along(split, 1)
            return tree_map(lambda leaf: local(leaf, wanted), value)

        summed = tuple(Partial() if each else Replicate() for each in split)
        for table, key, _ in self.kept[-1].values():
            table[key] = table[key].to_local(grad_placements=summed)
        size = given.shape[batch] if batch is not None else None
        self.running.append((module._flat_weights, split, size))
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        names = ("input", "hx")
        read = [named(name, value) for name, value in zip(names, args, strict=False)]
        return tuple(read), {name: named(name, value) for name, value in kwargs.items()}

    def after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Restore the parameters, and redistribute outputs."""
        weights, split, size = self.running.pop()
        module._flat_weights = weights
        if output is not None:
            made, state = output
            batch = _batch(module)
            made = tree_map(lambda leaf: self._global(leaf, split, batch, size), made)
            output = made, tree_map(lambda leaf: self._global(leaf, split, 1, size), state)
        return super().after(module, args, kwargs, output)

    def _global(self, leaf: Any, split: Sequence[bool], batch: int, size: int | None) -> Any:
        """The result of this process's shard of the batch, of `size` rows globally, as a DTensor."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = leaf.shape
        if size is not None:
            shape = torch.Size(size if dim == batch else each for dim, each in enumerate(leaf.shape))
        stride = torch.empty(shape, device="meta").stride()
        mesh, along = self.device_mesh, _along(split, batch)
        return DTensor.from_local(leaf.contiguous(), mesh, along, run_check=False, shape=shape, stride=stride)


def _batch(module: torch.nn.Module) -> int:
    """The batch dim of a module's input and output."""
    return 0 if module.batch_first else 1


def _along(split: Sequence[bool], dim: int | None) -> PlacementTuple:
    return tuple(Shard(dim) if each and dim is not None else Replicate() for each in split)


def border_of(module: torch.nn.Module) -> type[Border]:
    """The class of hooks that a module needs."""
    if isinstance(module, torch.nn.MultiheadAttention):
        return Attention
    return Recurrent if isinstance(module, torch.nn.RNNBase) else Border


def reduced(leaf: Any) -> Any:
    """A result of the model with partial sums reduced."""
    if isinstance(leaf, DTensor) and any(isinstance(each, Partial) for each in leaf.placements):
        return placed(leaf, [Replicate() if isinstance(p, Partial) else p for p in leaf.placements])
    return leaf
