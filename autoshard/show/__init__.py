"""Presents a plan: report, page, plots, explanations."""
