"""Distributed checkpoints of a model under a plan: saved as shards, loaded as the shards of any other plan.

    import torch.distributed.checkpoint as dcp
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner
    from autoshard.lower.checkpoint import SavePlanner

    dcp.save(state, checkpoint_id=directory, planner=SavePlanner())
    dcp.load(state, checkpoint_id=directory, planner=SPMDLoadPlanner())

`state` is a (nested) dict of tensors, such as `{"model": model.state_dict()}`; loading writes into the tensors that it
is given, sharded by `plan.apply`. Both calls need a process group (`torch.distributed`, gloo), of one process too.

Save with this planner, not torch_xla's: `SPMDSavePlanner` (2.9) drops all copies of a replicated shard, so that a
tensor split over some axes and replicated over others is silently missing from the checkpoint.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner


class SavePlanner(SPMDSavePlanner):  # type: ignore[misc]
    """Saves each shard once: the first of the replicas in this process."""

    def create_local_plan(self) -> Any:
        """What this process writes."""
        plan = super().create_local_plan()
        first = {item.index: item for item in reversed(plan.items)}  # an index is a tensor's name and an offset
        return dataclasses.replace(plan, items=[item for item in plan.items if first[item.index] is item])


__all__ = ["SavePlanner"]
