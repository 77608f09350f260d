"""Distributed checkpoints of a model under a plan: saved as shards, loaded as the shards of any other plan.

    import torch.distributed.checkpoint as dcp
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner
    from autoshard.lower.checkpoint import SavePlanner

    dcp.save(state, checkpoint_id=directory, planner=SavePlanner())
    dcp.load(state, checkpoint_id=directory, planner=SPMDLoadPlanner())

`state` is a (nested) dict of tensors, such as `{"model": model.state_dict()}`; loading writes into the tensors that it
is given, which have been placed by `plan.apply`. Both calls want a process group (`torch.distributed`, gloo), of one
process too.

Use this planner to save, rather than torch_xla's own: `SPMDSavePlanner` of torch_xla 2.9 plans to write every local
shard of a tensor, those that are copies of one another too, and then drops what is there twice, both of it. A tensor
that is split over some axes of the mesh and repeated over the others is left out of the checkpoint without a word.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner


class SavePlanner(SPMDSavePlanner):  # type: ignore[misc]
    """Writes each shard once: the first of those in this process that hold the same part of a tensor."""

    def create_local_plan(self) -> Any:
        """What this process writes."""
        plan = super().create_local_plan()
        first = {item.index: item for item in reversed(plan.items)}  # an index is a tensor's name and an offset
        return dataclasses.replace(plan, items=[item for item in plan.items if first[item.index] is item])


__all__ = ["SavePlanner"]
