"""Check a plan against XLA's own compilers: compile the annotated program, read its collectives back, run it."""
