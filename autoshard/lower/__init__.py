"""Lowers plans: annotations through torch_xla, DTensor placements, a jax function, transformers' `tp_plan`."""
