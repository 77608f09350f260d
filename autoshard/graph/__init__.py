"""StableHLO as a graph of plain ops, and the rule by which each may be split."""
