"""A training loop watched at its first step, planned, and annotated from then on."""
