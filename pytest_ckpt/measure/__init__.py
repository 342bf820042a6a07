"""Measuring this machine: memory, devices, and (to come) spans and resource samples."""
