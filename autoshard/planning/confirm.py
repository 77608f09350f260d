"""`plan(..., confirm=…)`: whether a plan fits its memory limit is for the target's compiler to say.

The chosen plan is compiled. Where it takes more than the limit, the road is travelled again with a lower limit for the
prediction: lower by how much more was compiled than predicted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard.graph.annotations import with_regions
from autoshard.planning.candidate import Chosen
from autoshard.planning.memory import TIGHTER
from autoshard.planning.meshes import confirming_target
from autoshard.planning.options import PlanningOptions
from autoshard.plans.value import Confirmation, NoPlanError
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import compile_annotated
from autoshard.verify.compile import CompileError, OutOfMemoryError
from autoshard.verify.targets import Target, TargetError

NEAR = 0.8
"""Part of the memory limit above which `auto` confirms a predicted peak: most predictions are within 15 %."""
COMPILES = 3
"""Most plans that are compiled."""
SECONDS = 300.0
"""Most seconds of compiling, in all."""

Solve = Callable[[PlanningOptions], Chosen]


def confirmed(solve: Solve, options: PlanningOptions) -> tuple[Chosen, Confirmation | None]:
    """The choice, which fits its memory limit as compiled or is marked as not confirmed.

    None where the compiler is not to be asked: never, or not near the limit.

    Raises:
        NoPlanError: no plan fits as compiled; says what those compiled take. Or there is none by prediction.
        TargetError: always asked for, and there is no compiler.
    """
    found = solve(options)
    limit = found.candidate.memory
    near = limit is not None and found.predicted_bytes > NEAR * limit
    if options.confirm == "never" or (options.confirm == "auto" and not near):
        return found, None
    try:
        target = confirming_target(found.candidate.mesh, options.refine)
        package, version = list(target.packages().items())[-1]
    except TargetError as error:
        if options.confirm == "always":
            raise
        return found, Confirmation("not confirmed", note=str(error))
    return _Confirming(solve, options, limit, f"{package} {version}", target).fitting(found)


@dataclass
class _Confirming:
    """Plans that are compiled one after the other, until one fits.

    Attributes:
        target: of the last one; another mesh may lie on another.
        least: bytes per device of the compiled plan that takes least.
        seconds, compiles: spent so far.
    """

    solve: Solve
    options: PlanningOptions
    limit: int | None
    compiler: str
    target: Target
    least: float = math.inf
    seconds: float = 0.0
    compiles: int = 0

    def fitting(self, found: Chosen) -> tuple[Chosen, Confirmation]:
        """The choice, or what is found in its place within less memory; see `confirmed`."""
        while self.compiles < COMPILES and self.seconds < SECONDS:
            try:
                needed, room = self.compiled(found)
            except CompileError as error:
                return self.within_limit(found), self.said("not confirmed", note=str(error).splitlines()[0])
            if needed <= room:
                return self.within_limit(found), self.said("fits", compiled_bytes=needed)
            self.least = min(self.least, needed)
            found = self.smaller(found, room / needed)
        note = f"not compiled; the least of {self.compiles} that were takes {self.least:,.0f} bytes per device"
        return self.within_limit(found), self.said("not confirmed", note=note)

    def compiled(self, found: Chosen) -> tuple[int, float]:
        """Bytes per device that the choice takes as compiled, and how many there are.

        Raises:
            CompileError: the compiler refuses it for another reason than memory, or takes too long.
        """
        self.options.progress("confirm")
        started = time.perf_counter()
        try:
            candidate, left, graph = found.candidate, SECONDS - self.seconds, found.graph
            self.target = confirming_target(candidate.mesh, self.options.refine)
            annotations = with_regions(graph, candidate.annotations, candidate.prediction.specs)
            module = annotate(graph.program, graph, annotations, candidate.mesh, platform=self.target.family)
            compiled = compile_annotated(graph, candidate.mesh, self.target, module, timeout=left)
            return compiled.memory.peak, self.limit or math.inf
        except OutOfMemoryError as error:
            room = error.available or found.predicted_bytes
            needed = error.needed or int(found.predicted_bytes / NEAR)
            return max(needed, room + 1), min(room, self.limit or math.inf)
        finally:
            self.seconds += time.perf_counter() - started
            self.compiles += 1

    def smaller(self, found: Chosen, share: float) -> Chosen:
        """A choice of which that share is predicted, or less; where there is none, the one of least memory.

        Raises:
            NoPlanError: nothing that is smaller by 1 % is predicted.
        """
        asked = TIGHTER * share * found.predicted_bytes
        for _ in range(2):
            try:
                return self.solve(replace(self.options, memory=asked))
            except NoPlanError as error:
                refused, asked = error, error.least
            if asked > max(share, TIGHTER) * found.predicted_bytes:
                break
        limit = "the device" if self.limit is None else f"{self.limit:,} bytes per device"
        raise NoPlanError(
            f"no plan was found that fits {limit} as compiled: the least of {self.compiles} that {self.compiler} "
            f"compiled takes {self.least:,.0f} bytes per device, and of a smaller one, {refused}",
            self.least,
        )

    def within_limit(self, found: Chosen) -> Chosen:
        """The choice under the limit that was asked for."""
        return replace(found, candidate=replace(found.candidate, memory=self.limit))

    def said(self, verdict: str, *, compiled_bytes: int | None = None, note: str = "") -> Confirmation:
        """What came of it."""
        figures = compiled_bytes, self.compiles, round(self.seconds, 3)
        return Confirmation(verdict, str(self.target), self.compiler, *figures, note)
