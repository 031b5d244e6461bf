"""Figures of `bench serve`: from the tokens of each request, with their times, to latencies, rates and equal tokens."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvservice.bench.serve_trace import ServeTrace

POINTS = 100


@dataclass
class Served:
    """Answers of a contender: for every request its tokens, and the seconds after the start at which each was known."""

    token_ids: list[list[int]]
    token_times_s: list[list[float]]
    details: dict[str, Any] = field(default_factory=dict)
    """More figures, which only this kind of contender has."""


def figures(trace: ServeTrace, served: Served) -> dict[str, float]:
    """Return the figures of one run: first tokens are timed from a request's arrival.

    Tokens that a request did not ask for, such as those of a static batch that waits for its longest row, do not count.
    """
    first, between, last, count = [], [], 0.0, 0
    for request, times in zip(trace.requests, served.token_times_s, strict=True):
        kept = times[: request.num_tokens]
        assert len(kept) == request.num_tokens, "every request is served to its end"
        first.append(kept[0] - request.arrival_s)
        between.extend(np.diff(kept).tolist())
        last, count = max(last, kept[-1]), count + len(kept)
    return {
        "seconds": last,
        "output_tokens_per_s": count / last,
        "first_token_p50_s": statistics.median(first),
        "first_token_p99_s": float(np.quantile(first, 0.99)),
        "between_tokens_p50_s": statistics.median(between) if between else 0.0,
        "between_tokens_p99_s": float(np.quantile(between, 0.99)) if between else 0.0,
    }


def equality(trace: ServeTrace, served: Served, reference: Served) -> dict[str, float]:
    """Return the part of requests whose tokens all equal the reference's, and the part of tokens before the first
    difference of their request."""
    same_requests, same_tokens = 0, 0
    for request, tokens, expected in zip(trace.requests, served.token_ids, reference.token_ids, strict=True):
        length = request.num_tokens
        equal = np.equal(tokens[:length], expected[:length])
        same_tokens += length if equal.all() else int(equal.argmin())
        same_requests += bool(equal.all())
    return {"same_requests": same_requests / len(trace), "same_tokens": same_tokens / trace.output_tokens}


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run whose rate is the median of all, with the rates of all."""
    rates = [run["output_tokens_per_s"] for run in runs]
    return runs[rates.index(statistics.median_low(rates))] | {"rates": rates}


def progress(served: Served) -> list[tuple[float, int]]:
    """Return points (seconds, tokens generated until then), at most POINTS of them."""
    times = sorted(at for row in served.token_times_s for at in row)
    marks = np.unique(np.linspace(1, len(times), min(POINTS, len(times))).astype(int)).tolist()
    return [(0.0, 0), *((times[count - 1], count) for count in marks)]
