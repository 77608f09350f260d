"""XLA's TPU compiler, libtpu."""
