"""Capture through torch_xla."""
