"""Graph to Problem, and a choice back to annotations: the strategies of each fusion group and their costs."""
