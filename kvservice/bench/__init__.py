"""Benchmarks that a user can run: `kvservice bench`."""
