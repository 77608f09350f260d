"""Plans beside one another, predicted and compiled."""
