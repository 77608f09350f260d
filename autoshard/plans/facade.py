"""The methods of a plan, each handed on to the package that does it.

The one place in `plans/` that reaches into the packages above it: a `Plan` is a value, and reading, checking, rendering
and lowering are functions of their own packages, imported when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from autoshard.graph.annotations import Annotations
    from autoshard.graph.ops import Graph
    from autoshard.lower.dtensor.distribute import DTensorPlan
    from autoshard.lower.to_jax import JaxShardings
    from autoshard.mesh import Mesh
    from autoshard.plans.value import Plan
    from autoshard.program import Program
    from autoshard.show.explanation import Explanation


class PlanMethods:
    """What can be done with a plan."""

    @property
    def _plan(self) -> Plan:
        return cast("Plan", self)

    def to_json(self) -> str:
        """The plan as JSON, version 1; the same plan always gives the same text."""
        from autoshard.plans.json_format import dumps

        return dumps(self._plan)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "plan") -> Plan:
        """The plan that `to_json` wrote; `source` is what to call the text in messages.

        Raises:
            PlanError: not JSON, another format, an unknown version, or malformed: with the path of the bad field.
        """
        from autoshard.plans.json_format import loads

        return loads(text, source)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            PlanError: the path cannot be written.
        """
        from autoshard.plans.json_format import save

        save(self._plan, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or as `from_json`.
        """
        from autoshard.plans.json_format import load

        return load(path)

    def check_program(self, program: Program) -> None:
        """Refuse a program that is not the planned one.

        Raises:
            PlanMismatchError: with the first difference: kind, switches, argument, aten op.
        """
        from autoshard.plans.check import check_program

        check_program(self._plan, program)

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh of another shape, with other axis names, or of another device kind.

        Raises:
            PlanMismatchError: with both meshes.
        """
        from autoshard.plans.check import check_mesh

        check_mesh(self._plan, mesh)

    def annotations(self, graph: Graph) -> Annotations:
        """The pins and copies that this plan writes on the graph of its program.

        Raises:
            PlanMismatchError: the graph is of another program.
            PlanError: two entries pin one value differently, or an entry names a value that the graph has not.
        """
        from autoshard.plans.annotated import annotations_of

        return annotations_of(self._plan, graph)

    def __str__(self) -> str:
        """A report for a person: what splits what per module, totals, what could not be split."""
        from autoshard.show.report import plan_report

        return plan_report(self._plan)

    def to_html(self, explanations: Sequence[Explanation] = ()) -> str:
        """The plan as one self-contained page, with what `autoshard.explain` said of some tensors."""
        from autoshard.show.page import page

        return page(self._plan, explanations)

    def apply(self, model: Any, optimizer: Any = None) -> Any:
        """Move `model` to the XLA devices, sharded as planned, with its optimizer state; see `lower.torch_xla`."""
        from autoshard.lower.torch_xla.mark_sharding import apply

        return apply(self._plan, model, optimizer)

    def annotate(self) -> AbstractContextManager[Any]:
        """A context for one ordinary step, whose values are annotated as planned; see `lower.torch_xla`."""
        from autoshard.lower.torch_xla.mark_sharding import annotate

        return annotate(self._plan)

    def to_jax(self, devices: Sequence[Any] | None = None) -> JaxShardings:
        """The plan in jax's words, on jax's devices: NamedShardings, and the step as a function; see `lower.to_jax`."""
        from autoshard.lower.to_jax import to_jax

        return to_jax(self._plan, devices)

    def to_dtensor(self, device_mesh: Any) -> DTensorPlan:
        """The plan in DTensor's words, on a `torch.distributed` device mesh; see `lower.dtensor`."""
        from autoshard.lower.dtensor.distribute import to_dtensor

        return to_dtensor(self._plan, device_mesh)

    def to_tp_plan(self, model: Any, axis: str | None = None) -> tuple[dict[str, str], list[str]]:
        """The plan in the words of transformers' `tp_plan`, and what it cannot say; see `lower.tp_plan`."""
        from autoshard.lower.tp_plan import to_tp_plan

        return to_tp_plan(self._plan, model, axis)
