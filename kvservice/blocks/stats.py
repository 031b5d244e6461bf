"""Gauges and counters of a block manager.

`BlocksStats` is their one list. Its names are those of the contract: the server answers GetStats from it, the daemon
shares it with its observer as an array in this order, and metrics and snapshots are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BlocksStats(NamedTuple):
    """Gauges, followed by counters since the start, in blocks, sequences and tokens.

    num_blocks = free + active + shared + cached + pinned. An active block is in one table or being loaded, a shared
    block in several. A cached block is in no table but in the prefix index; a pinned block is cached, and protected
    from eviction.
    """

    num_blocks: int = 0
    free_blocks: int = 0
    active_blocks: int = 0
    shared_blocks: int = 0
    cached_blocks: int = 0
    pinned_blocks: int = 0
    num_swap_blocks: int = 0
    used_swap_blocks: int = 0
    sequences: int = 0
    swapped_sequences: int = 0
    tokens: int = 0

    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    computed_tokens: int = 0
    cow_copies: int = 0
    evicted_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_sequences: int = 0
    swapped_in_sequences: int = 0


@dataclass(slots=True)
class BlockCounters:
    """The counters of BlocksStats that operations increment. The device pool counts evicted blocks."""

    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    computed_tokens: int = 0
    cow_copies: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_sequences: int = 0
    swapped_in_sequences: int = 0
