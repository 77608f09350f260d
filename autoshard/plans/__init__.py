"""A plan as a value, its JSON, and its checks."""
