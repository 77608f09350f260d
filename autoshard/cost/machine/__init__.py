"""Devices and their networks: kinds, topologies, the time of a kernel and of a collective, calibration."""
