"""Upper bounds of the hit share of a trace, whatever the placement."""

from __future__ import annotations

import heapq

from kvservice.planning.trace import Trace


def everything_share(trace: Trace) -> float:
    """Return the hit share if nothing were ever evicted, and all daemons had one cache."""
    seen, hits = set[int](), 0
    for request in trace.requests:
        hits += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    return hits * trace.block_size / trace.input_tokens


def one_cache_share(trace: Trace, num_blocks: int) -> float:
    """Return the hit share of one cache with the room of all daemons that knows the future: it evicts, or does not
    keep, the block that is needed last (Belady's MIN), and any block counts, with or without those before it."""
    accesses = [block for request in trace.requests for block in request.blocks]
    next_use = [len(accesses)] * len(accesses)
    last: dict[int, int] = {}
    for position in range(len(accesses) - 1, -1, -1):
        next_use[position] = last.get(accesses[position], len(accesses))
        last[accesses[position]] = position
    cached: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for position, block in enumerate(accesses):
        hits += block in cached
        cached[block] = next_use[position]
        heapq.heappush(latest, (-next_use[position], block))
        while len(cached) > num_blocks:
            use, candidate = heapq.heappop(latest)
            if cached.get(candidate) == -use:
                del cached[candidate]
    return hits * trace.block_size / trace.input_tokens
