"""How the partitioner handles each kind of op."""
