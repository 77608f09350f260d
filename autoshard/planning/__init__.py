"""The road from a captured program to a plan."""
