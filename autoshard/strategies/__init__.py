"""Graph to Problem, and a choice back to annotations: the strategies of each group of ops and their prices."""
