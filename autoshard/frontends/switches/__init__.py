"""What is replaced in PyTorch while a step is traced."""
