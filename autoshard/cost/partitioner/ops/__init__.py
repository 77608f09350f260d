"""How the partitioner splits each kind of op."""
