"""Compiler behaviour of each target family that changes the cost of a plan.

From XLA's sources for CPU and GPU (passes in brackets) and from programs compiled with libtpu 0.0.51. Code asks for
a capability, never for a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Target = Literal["cpu", "tpu", "gpu"]


@dataclass(frozen=True)
class Capabilities:
    """What a compiler does; by default nothing of this."""

    compiles_for_all_kinds: bool = False  # at once, and for any number of devices
    merges_equal_ops: bool = False  # before propagation; every user has its own copy of a constant expression
    shards_results_first: bool = False  # propagates annotations of results before other annotations
    calls_top_k: bool = False  # turns sorts for a top-k into custom calls, which stop propagation
    splits_top_k_and_norms: bool = False  # partitions top-k, and batch normalisation after expanding it
    keeps_barriers: bool = False  # ops after an `optimization_barrier` wait for those before it
    windowed_einsums: bool = False  # collective matmuls: loops of permutes that overlap products
    fuses_attention: bool = False  # a softmax into the product that reads it
    rounds_for_products: bool = False  # f32 values that only products use move as bf16
    turns_products: bool = False  # computes a product transposed if its only user is a transpose
    folds_into_convolutions: bool = False  # transposes and reversals of kernels
    narrows_integers: bool = False  # from 64 bits to 32; indices of gathers before they move
    exchanges_rows: bool = False  # permutes rows to their devices in a concatenation of one row per device
    sums_dims_at_once: bool = False  # one all-reduce for a sum along several dims
    folds_sums: bool = False  # its replica groups in the order of the mesh, not of the dims (`AllReduceFolder`)
    sums_terms_once: bool = False  # adds partial sums, then one all-reduce (`AllReduceReassociate`)
    sums_widened_terms: bool = False  # also of terms converted to a wider dtype in between
    scatters_sums: bool = False  # all-reduce and dynamic-slice become a reduce-scatter (`ReduceScatterCreator`)
    scatters_uneven_slices: bool = False  # also of slices with padding
    scatters_behind_reshapes: bool = False  # also after a reshape that splits off the sliced dim and a transpose of it
    slices_sooner: bool = False  # a slice moves before an op whose other operands are broadcasts
    splits_all_reduces: bool = False  # one over all devices, sliced within groups, into two (`AllReduceSplitter`)
    gathers_before_broadcasts: bool = False  # a broadcast's operand (`AllGatherBroadcastReorder`)
    gathers_no_repeats: bool = False  # no all-gather along a dim that a broadcast adds
    gathers_before_widening: bool = False  # gathers or exchanges before widening conversions (`CollectiveQuantizer`)
    gathers_dims_at_once: bool = False  # one all-gather along several dims
    regathers: bool = False  # for every user, except for nearby users (`ScheduleAwareCollectiveOpsCSE`)
    gathers_arguments_first: bool = False  # at the start of the step
    fuses_slices: bool = False  # into products that read them
    lays_out_in_tiles: bool = False  # a reshape that no tiles keep is a copy
    stores_shared_indices: bool = False  # of a gather and its gradient, if joined for each dim
    fuses_no_gathers: bool = False  # of rows into sums that read them
    delays_gradients: bool = False  # of weights, while the backward pass goes on
    copies_inputs_on_chip: bool = False  # whole, even if a device reads only a slice
    aborts_on_padded_scatters: bool = False  # where it cannot pad unevenly split indices


_OF_ACCELERATORS = Capabilities(
    keeps_barriers=True,
    sums_dims_at_once=True,
    sums_terms_once=True,
    scatters_sums=True,
    gathers_before_broadcasts=True,
)

CAPABILITIES: Mapping[Target, Capabilities] = {
    "cpu": Capabilities(compiles_for_all_kinds=True, gathers_arguments_first=True),
    "gpu": replace(
        _OF_ACCELERATORS,
        shards_results_first=True,
        calls_top_k=True,
        stores_shared_indices=True,
        folds_sums=True,
        sums_widened_terms=True,
        splits_all_reduces=True,
        gathers_no_repeats=True,
        gathers_before_widening=True,
        delays_gradients=True,
    ),
    "tpu": replace(
        _OF_ACCELERATORS,
        merges_equal_ops=True,
        calls_top_k=True,
        splits_top_k_and_norms=True,
        windowed_einsums=True,
        fuses_attention=True,
        rounds_for_products=True,
        turns_products=True,
        folds_into_convolutions=True,
        narrows_integers=True,
        exchanges_rows=True,
        scatters_uneven_slices=True,
        scatters_behind_reshapes=True,
        slices_sooner=True,
        gathers_dims_at_once=True,
        regathers=True,
        fuses_slices=True,
        lays_out_in_tiles=True,
        fuses_no_gathers=True,
        copies_inputs_on_chip=True,
        aborts_on_padded_scatters=True,
    ),
}
"""By target family."""
