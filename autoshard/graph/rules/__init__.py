"""Sharding rules: one rule over factors per op kind."""
