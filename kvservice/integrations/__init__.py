"""Inference libraries that run with their K/V in the daemon. Each is imported by itself; none is a dependency."""
