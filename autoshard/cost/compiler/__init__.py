"""What each target's compiler makes of one device's program: kernels, their order, memory."""
