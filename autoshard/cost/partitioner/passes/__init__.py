"""Compiler passes that rewrite the graph before shardings propagate."""
