"""The steps from one sharding of a value to another, and what they cost."""
