"""Compares plans, predicted and compiled."""
