"""A training loop watched at its first step, planned, and annotated from then on."""

from autoshard.auto.policy import auto_policy, current_plan, use_spmd

__all__ = ["auto_policy", "current_plan", "use_spmd"]
