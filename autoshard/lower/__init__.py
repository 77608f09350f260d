"""Plans written back as annotations: `mark_sharding` for torch_xla, `shardy` for modules without PyTorch."""
