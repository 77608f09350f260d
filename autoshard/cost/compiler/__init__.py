"""The compilers behind the partitioner: kernels of one device's program, their schedule, memory."""
