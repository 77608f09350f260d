"""StableHLO modules in and out: MLIR to graphs, annotated modules, HLO protos."""
