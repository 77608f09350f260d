"""Decides how a PyTorch program is split over many devices, and proves how good the decision is.

`import autoshard` is light: torch, torch_xla, jax and the solvers are imported by the functions that need them.
"""

__version__ = "0.1.0"

from autoshard.auto.policy import auto_policy, use_spmd
from autoshard.comparison.compared import Comparison, compare
from autoshard.errors import AutoshardError, CaptureError, SourceError
from autoshard.mesh import Mesh
from autoshard.planning.api import capture, evaluate, manual_plan, plan, plan_program, register_rule
from autoshard.plans.value import Plan, PlanError, PlanMismatchError
from autoshard.show.explanation import Explanation, explain

__all__ = [
    "AutoshardError",
    "CaptureError",
    "Comparison",
    "Explanation",
    "Mesh",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "SourceError",
    "auto_policy",
    "capture",
    "compare",
    "evaluate",
    "explain",
    "manual_plan",
    "plan",
    "plan_program",
    "register_rule",
    "use_spmd",
]
