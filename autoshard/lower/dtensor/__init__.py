"""Plans as DTensor placements."""
