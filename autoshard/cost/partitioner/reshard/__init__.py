"""Resharding: the collectives from one sharding of a value to another, and their cost."""
