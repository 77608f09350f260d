"""A solver for strategy-selection problems: it knows arrays, not models."""
