"""What compilers rewrite in the graph before shardings propagate."""
