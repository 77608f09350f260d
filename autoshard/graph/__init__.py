"""StableHLO as a graph of plain ops, and the sharding rule of each."""
