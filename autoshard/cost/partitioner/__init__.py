"""GSPMD: sharding propagation from annotations, then the SPMD program of one device with its collectives."""
