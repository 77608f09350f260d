"""Captures PyTorch steps as StableHLO, with every argument and op named after its PyTorch origin."""
