"""Solver of strategy-selection problems (a pairwise model with memory constraints). It knows arrays, not models."""
