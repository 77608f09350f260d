"""Experiment."""
from __future__ import annotations
import os
from collections.abc import Sequence
from autoshard.cost.compute import CONTRACTIONS
from autoshard.cost.kernels import Kernel
from autoshard.cost.latency import overlapped
from autoshard.cost.lowered import BARRIER, COLLECTIVES, Lowered
from autoshard.cost.schedule import Dependencies
from autoshard.graph.groups import ELEMENTWISE

CLOCK = 1.5e9
HBM = 491.8
ICI = 62.2
HEAVY = {"exponential", "log", "tanh", "divide", "sqrt", "rsqrt", "power", "logistic", "erf", "sine", "cosine", "exponential_minus_one", "log_plus_one"}
ASYNC = {"all-gather", "collective-permute"}
W = float(os.environ.get("LHS_W", "0.25")); HW = float(os.environ.get("LHS_HW", "4")); FL = float(os.environ.get("LHS_FL", "65000"))

def moves(kernel, program):
    if kernel.kind not in ASYNC:
        return False
    return kernel.kind != "all-gather" or sum(program.arrays[a].bytes for a in kernel.writes) >= 4096

def takes(kernel: Kernel, program: Lowered, size) -> float:
    A = program.arrays
    if kernel.kind in COLLECTIVES:
        made = [size(A[a]) for a in kernel.writes]
        read = [size(A[a]) for a in kernel.reads]
        if kernel.kind == "all-reduce":
            return made[0] / ICI if made else 1.0
        if kernel.kind == "all-to-all":
            return sum(made) / ICI * 3.5
        if kernel.kind == "reduce-scatter":
            return sum(read) / ICI
        if kernel.kind == "collective-permute":
            return sum(made) / ICI * 2
        return sum(made) / ICI
    if kernel.kind == BARRIER:
        return 0.0
    steps = [program.steps[n] for n in kernel.steps]
    if len(steps) <= 1 and not kernel.flops:
        return 1.0
    if kernel.kind in ("gather", "scatter"):
        return 1.0
    moved = sum(size(A[a]) for a in {*kernel.reads, *kernel.writes})
    work = 0.0
    for s in steps:
        if s.kind in ELEMENTWISE or s.kind == "reduce":
            n = max([A[a].elements for a in (*s.reads, *s.writes)] or [0])
            work += n / 1024 * (HW if s.kind in HEAVY else W)
    return 3600 + max(moved / HBM, kernel.flops / FL + work)

def order(base: Sequence[int], kernels, deps: Dependencies, program: Lowered, size):
    t = [takes(k, program, size) for k in kernels]
    m = [moves(k, program) for k in kernels]
    if not any(m):
        return list(base)
    v = [len(k.writes) > 1 for k in kernels]
    placed = overlapped(base, deps, t, m, v, edge=1.0, elements=True)
    seen = set(); out = []
    for n, end in placed:
        if n not in seen:
            seen.add(n); out.append(n)
    from autoshard.cost.order_tpu import _deferred
    lazy = {n for n, k in enumerate(kernels) if not k.reads and deps.users[n]}
    return _deferred(out, lazy, deps.makers)
