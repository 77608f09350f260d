"""XLA's GPU compiler."""
