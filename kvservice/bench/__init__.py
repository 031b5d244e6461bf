"""Benchmarks of the command `kvservice bench`."""
