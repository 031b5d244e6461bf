"""Benchmarks of the command `kvservice bench`, and the parts that all of them share: contenders take turns, and outputs
are compared with attention in float64."""

from kvservice.bench.harness import attention_rows, largest_error, medians, normal, quantiles, sampled, take_turns

__all__ = ["attention_rows", "largest_error", "medians", "normal", "quantiles", "sampled", "take_turns"]
