"""What a step costs: device kinds, collectives, resharding, compute, memory; and predictions from annotations."""
