"""XLA's GPU compiler: what it fuses, combines, and in which order it runs.

Loops fuse into loops and into reductions; a product takes in transposes. Collectives of one kind are combined up to
30 MiB of results (`kDefault*CombineThreshold`), all-reduces work in place. Of three orders the one with the lowest peak
is taken (`DefaultMemoryScheduler`); the latency hiding scheduler is off by default.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autoshard.cost.backend import Backend
from autoshard.cost.kernels import Fusion, Kernel
from autoshard.cost.lowered import Lowered
from autoshard.cost.schedule import Dependencies, combined, depth_first, greedy, liveness, post_order

COMBINED = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
THRESHOLD = 30 * 2**20
"""Bytes of results up to which collectives are combined (xla/service/collective_utils.h)."""


class GpuBackend(Backend):
    """XLA's GPU compiler."""

    alignment = 128

    def fusion(self, program: Lowered) -> Fusion:
        """Loops and reductions."""
        return Fusion(program)

    def combine(self, kernels: list[Kernel], program: Lowered) -> list[Kernel]:
        """Independent collectives of one kind over the same devices, up to 30 MiB."""

        def key(kernel: Kernel) -> Hashable:
            step = program.steps[kernel.steps[-1]]
            if kernel.kind not in COMBINED or step.collective is None:
                return None
            dtype = program.arrays[step.writes[0]].dtype
            return kernel.kind, step.collective.axes, None if kernel.kind == "all-gather" else dtype

        def size(kernel: Kernel) -> int:
            return sum(program.arrays[array].bytes for array in kernel.writes)

        for kernel in kernels:
            if kernel.kind == "all-reduce":
                kernel.shares = True
        return combined(kernels, key, size, THRESHOLD)

    def order(self, kernels: Sequence[Kernel], deps: Dependencies, program: Lowered) -> list[int]:
        """The order with the lowest peak of three."""
        arrays = program.arrays
        sizes = [sum(arrays[array].bytes for array in kernel.writes) for kernel in kernels]
        orders = [greedy(kernels, deps, arrays), depth_first(deps, sizes), post_order(deps)]
        return min(orders, key=lambda order: liveness(kernels, order, arrays, self.buffer_bytes).peak)
