"""Replacements of PyTorch functions during a traced step."""
