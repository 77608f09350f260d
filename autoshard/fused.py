"""The ops that are lowered as manual regions: attention and a mixture's experts, by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autoshard.attention import form as attention_form
from autoshard.attention import kernels as attention_kernels
from autoshard.attention.dims import attention_dims
from autoshard.experts import form as experts_form
from autoshard.experts import kernels as experts_kernels
from autoshard.experts.dims import experts_dims
from autoshard.program import TensorType
from autoshard.regions.dims import RegionDims
from autoshard.regions.kernel import Kernel, Platform

Form = attention_form.Form | experts_form.Form
KINDS = attention_form.KINDS | experts_form.KINDS
"""Kinds of `graph.ops.Op`."""
TARGETS = {f"autoshard.{kind}": kind for kind in sorted(KINDS)}
"""Target of the custom call -> kind."""


@dataclass(frozen=True)
class Signature:
    """Such an op, with the types of its operands and results."""

    kind: str
    form: Form
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]


def form_class(kind: str) -> type[Form]:
    """The class of an op's form."""
    return experts_form.Form if kind in experts_form.KINDS else attention_form.Form


def dims_of(kind: str, form: Form, operands: Sequence[Sequence[int]]) -> RegionDims:
    """The dims of an op with operands of these shapes."""
    return _dims(kind, form, tuple(map(tuple, operands)))


@lru_cache(maxsize=4096)
def _dims(kind: str, form: Form, operands: tuple[tuple[int, ...], ...]) -> RegionDims:
    if isinstance(form, experts_form.Form):
        return experts_dims(kind, operands)
    return attention_dims(kind, form, operands)


def dims_of_attrs(kind: str, attrs: Mapping[str, Any], operands: Sequence[Sequence[int]]) -> RegionDims:
    """The same of a graph op with these attributes."""
    return dims_of(kind, form_class(kind).of(attrs), operands)


def kernel_of(op: Signature, local: tuple[TensorType, ...], shards: int, platform: Platform, device: str) -> Kernel:
    """What a device runs for its part.

    Args:
        local: types of the part's operands.
        shards: over how many devices the dim `RegionDims.extras` is split.
        device: kind of device, such as `h100`.
    """
    if isinstance(op.form, experts_form.Form):
        return experts_kernels.lowered(experts_kernels.Part(op.kind, op.form, local, shards, platform))
    queries = op.operands[0].shape[3]
    part = attention_kernels.Part(op.kind, op.form, local, queries, shards, platform, device)
    return attention_kernels.lowered(part)
