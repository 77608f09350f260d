"""Attention as one op: its form in a module, what it computes, and the kernels that targets have for it."""
