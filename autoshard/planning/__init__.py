"""From a captured program to a plan."""
