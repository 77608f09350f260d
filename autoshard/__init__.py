"""Automatic sharding of PyTorch programs over many devices, with a proven optimality bound.

`import autoshard` is light: public names import their modules when first read; torch, torch_xla, jax and the solvers
are imported by the functions that need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.errors import AutoshardError, CaptureError, SourceError
from autoshard.mesh import Mesh
from autoshard.version import __version__ as __version__

if TYPE_CHECKING:
    from autoshard.api import Plan, capture, evaluate, manual_plan, plan, plan_program, register_rule
    from autoshard.auto.policy import auto_policy, use_spmd
    from autoshard.comparison.compared import Comparison, compare
    from autoshard.cost.compiler.eager import Eager
    from autoshard.cost.machine.asked import Estimate, EstimateError, estimate
    from autoshard.plans.value import PlanError, PlanMismatchError
    from autoshard.show.explanation import Explanation, explain

_MODULES = {
    "auto.policy": ("auto_policy", "use_spmd"),
    "comparison.compared": ("Comparison", "compare"),
    "cost.compiler.eager": ("Eager",),
    "cost.machine.asked": ("Estimate", "EstimateError", "estimate"),
    "api": ("Plan", "capture", "evaluate", "manual_plan", "plan", "plan_program", "register_rule"),
    "plans.value": ("PlanError", "PlanMismatchError"),
    "show.explanation": ("Explanation", "explain"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AutoshardError",
    "CaptureError",
    "Comparison",
    "Eager",
    "Estimate",
    "EstimateError",
    "Explanation",
    "Mesh",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "SourceError",
    "auto_policy",
    "capture",
    "compare",
    "estimate",
    "evaluate",
    "explain",
    "manual_plan",
    "plan",
    "plan_program",
    "register_rule",
    "use_spmd",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"autoshard.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
