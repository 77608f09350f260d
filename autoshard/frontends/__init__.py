"""PyTorch to Program: the step as StableHLO, every argument and op named after what it was in PyTorch."""
