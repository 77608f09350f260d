"""Annotates a running PyTorch step, through torch_xla."""
