"""What the compiler of each target family does to a program that changes what a plan of it costs.

Read off XLA's sources for CPUs and GPUs (passes in brackets) and off programs that libtpu 0.0.51 compiled. Where code
asks what a target does, it asks for one of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Target = Literal["cpu", "tpu", "gpu"]


@dataclass(frozen=True)
class Capabilities:
    """What a compiler does; nothing where nothing is said."""

    compiles_for_all_kinds: bool = False  # at once, and for any number of devices
    simplifies_first: bool = False  # products and updates before it propagates shardings (`AlgebraicSimplifier`)
    folds_transposes: bool = False  # into products before that, and takes apart their rows (`TransposeFolding`)
    compares_unclipped: bool = False  # what a ReLU reads, rather than its result, for the mask of the backward pass
    merges_equal_ops: bool = False  # before that; what follows from constants each reader has of its own
    shards_results_first: bool = False  # shardings of annotated results pass back before those of other annotations
    calls_top_k: bool = False  # sorts of which the greatest are taken are calls that propagation knows nothing of
    splits_top_k_and_norms: bool = False  # runs top-k and batch normalisation on parts, expanded before it partitions
    keeps_barriers: bool = False  # what lies behind an `optimization_barrier` waits for what lies before it
    windowed_einsums: bool = False  # loops of permutes beside products
    fuses_attention: bool = False  # softmaxes into the product that reads them
    rounds_for_products: bool = False  # what only products read is rounded to bf16, and moved so
    turns_products: bool = False  # a product that only a transpose reads is made transposed
    folds_into_convolutions: bool = False  # transposes and reversals of kernels
    narrows_integers: bool = False  # there are none of 64 bits; gathers take indices of 32
    exchanges_rows: bool = False  # of a concatenation of one row to a device, each is sent to where it belongs
    sums_dims_at_once: bool = False  # a sum along several dims is one all-reduce
    sums_terms_once: bool = False  # terms that are added are reduced after that (`AllReduceReassociate`)
    sums_widened_terms: bool = False  # terms that were widened in between, too
    scatters_sums: bool = False  # a sum that is sliced behind is a reduce-scatter (`ReduceScatterCreator`)
    scatters_uneven_slices: bool = False  # also of slices with padding
    scatters_behind_reshapes: bool = False  # also where the dim that is cut is split and brought forward behind it
    slices_sooner: bool = False  # a slice moves before an op whose other operands are broadcasts
    splits_all_reduces: bool = False  # one over all devices of which groups take parts is two (`AllReduceSplitter`)
    undoes_gathers: bool = False  # of what is cut again as it was (`AllGatherDynamicSliceSimplifier`)
    gathers_before_broadcasts: bool = False  # what is broadcast (`AllGatherBroadcastReorder`)
    gathers_no_repeats: bool = False  # along a dim that the broadcast makes nothing is gathered
    gathers_before_widening: bool = False  # and exchanges what is converted to a wider dtype (`CollectiveQuantizer`)
    gathers_dims_at_once: bool = False  # a gather along several dims is one all-gather
    regathers: bool = False  # for every reader, but for readers near one another (`ScheduleAwareCollectiveOpsCSE`)
    gathers_arguments_first: bool = False  # at the start of the step
    fuses_slices: bool = False  # into products that read them
    copies_inputs_on_chip: bool = False  # whole, where a device takes a part of them
    aborts_on_padded_scatters: bool = False  # where indices that it cannot pad are split unevenly


_OF_ACCELERATORS = Capabilities(
    simplifies_first=True,
    keeps_barriers=True,
    sums_dims_at_once=True,
    sums_terms_once=True,
    scatters_sums=True,
    undoes_gathers=True,
    gathers_before_broadcasts=True,
)

CAPABILITIES: Mapping[Target, Capabilities] = {
    "cpu": Capabilities(compiles_for_all_kinds=True, gathers_arguments_first=True),
    "gpu": replace(
        _OF_ACCELERATORS,
        shards_results_first=True,
        calls_top_k=True,
        sums_widened_terms=True,
        splits_all_reduces=True,
        gathers_no_repeats=True,
        gathers_before_widening=True,
    ),
    "tpu": replace(
        _OF_ACCELERATORS,
        folds_transposes=True,
        compares_unclipped=True,
        merges_equal_ops=True,
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
        copies_inputs_on_chip=True,
        aborts_on_padded_scatters=True,
    ),
}
"""By target family."""
