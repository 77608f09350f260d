"""What GSPMD makes of annotations: sharding propagation, then one device's program with its collectives."""
