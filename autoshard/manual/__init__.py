"""Plans by hand, as annotations.

Each takes a graph and a mesh and annotates what its authors annotate: parameters (optimizer states follow), inputs,
and the activations named in its docstring; GSPMD propagates the rest. They are generic over models: linear layers are
found by how a dot contracts their weight, and classified as column- or row-parallel by the names that model families
use, or by their place in a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Graph
from autoshard.manual.batch import (
    context_parallel,
    data_parallel,
    embedding_parallel,
    fsdp,
    fsdp_v2,
    hsdp,
    zero_1,
    zero_2,
)
from autoshard.manual.conventions import maxtext, torchtitan
from autoshard.manual.expert import expert_parallel
from autoshard.manual.find import gradients, linears, module_outputs, subtree_outputs
from autoshard.manual.spatial import spatial
from autoshard.manual.tensor import fsdp_tensor_parallel, megatron, sequence_parallel, vocabulary_parallel
from autoshard.manual.transformers_tp import transformers_plan
from autoshard.mesh import Mesh

__all__ = [
    "PLANS",
    "context_parallel",
    "data_parallel",
    "embedding_parallel",
    "expert_parallel",
    "fsdp",
    "fsdp_tensor_parallel",
    "fsdp_v2",
    "gradients",
    "hsdp",
    "linears",
    "maxtext",
    "megatron",
    "module_outputs",
    "plan_named",
    "sequence_parallel",
    "spatial",
    "subtree_outputs",
    "torchtitan",
    "transformers_plan",
    "vocabulary_parallel",
    "zero_1",
    "zero_2",
]

PLANS: Mapping[str, Callable[[Graph, Mesh], Annotations]] = {
    "dp": data_parallel,
    "zero1": zero_1,
    "zero2": zero_2,
    "fsdp": fsdp,
    "fsdpv2": fsdp_v2,
    "hsdp": hsdp,
    "megatron": megatron,
    "sequence": sequence_parallel,
    "fsdp-tp": fsdp_tensor_parallel,
    "context": context_parallel,
    "torchtitan": torchtitan,
    "maxtext": maxtext,
    "vocab": vocabulary_parallel,
    "hf-tp": transformers_plan,
    "expert": expert_parallel,
    "embedding": embedding_parallel,
    "spatial": spatial,
}
"""Name on the command line -> plan; one may raise ManualPlanError."""


def plan_named(name: str) -> Callable[[Graph, Mesh], Annotations]:
    """The plan called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in PLANS:
        raise ValueError(f"no manual plan is called {name!r}; there are {', '.join(PLANS)}")
    return PLANS[name]
