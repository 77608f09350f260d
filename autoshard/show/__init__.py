"""What a person sees of a plan: report, page, plots, explanations."""
