"""Lowers plans to DTensor placements."""
