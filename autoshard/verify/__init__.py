"""Checks a plan against XLA's own compilers: compiles the annotated program, reads its collectives, runs it."""
