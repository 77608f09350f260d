"""Watches a training loop's first step, plans it, and annotates the steps that follow."""

from autoshard.auto.policy import auto_policy, current_plan, use_spmd

__all__ = ["auto_policy", "current_plan", "use_spmd"]
