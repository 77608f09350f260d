"""Ops that are lowered as manual regions, in which each device runs a kernel on its part."""
