"""Blocks in the tiers below the daemon's memory: which of them are worth waiting for.

A look-up finds them by the daemon's measured speeds of its tiers. Blocks that come later than the engine would have
computed them are no hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvservice.client.store.values import Keys, key_bytes, num_keys, some_keys

# Estimates of an engine that nobody has measured, rather fast than slow: tokens of prompts, and bytes of K/V that it
# computes in a second.
_TOKENS_PER_S = 50_000
_BYTES_PER_S = 4e9
# The longest wait for blocks, however long computing them would take.
MAX_WAIT_S = 10.0


class FoundBlocks(NamedTuple):
    """How many blocks are worth loading before the first that is not, and how many are in memory before the first that
    is not."""

    num_leading: int
    num_in_memory: int


@dataclass(frozen=True)
class ComputeTime:
    """How long the engine takes to compute blocks: the most that waiting for them is worth."""

    block_s: float

    @staticmethod
    def of(prefill_tokens_per_s: float, block_size: int, block_bytes: int, num_ranks: int = 1) -> ComputeTime:
        """`block_size` in tokens, `block_bytes` of one of `num_ranks` parts of a block that come one after the other:
        each has its share of the time. A speed of 0 stands for an estimate."""
        if prefill_tokens_per_s:
            return ComputeTime(block_size / prefill_tokens_per_s / num_ranks)
        return ComputeTime(max(block_size / _TOKENS_PER_S / num_ranks, block_bytes / _BYTES_PER_S))

    def wait_s(self, num_blocks: int) -> float:
        return min(num_blocks * self.block_s, MAX_WAIT_S)


def find_blocks(
    store: Any,
    keys: Keys,
    compute: ComputeTime,
    *,
    counted: bool = True,
    explained: bool = True,
    timeout_s: float | None = None,
) -> FoundBlocks:
    """Look up the first blocks of a prompt in a store of the client. Raises its errors."""
    keys = key_bytes(keys)
    wait_s = compute.wait_s(num_keys(keys))
    found = store.lookup(keys, counted=counted, explained=explained, max_wait_s=wait_s, timeout_s=timeout_s)
    num_leading, num_in_memory = int(found.num_leading), int(found.num_in_memory)
    if 0 < num_leading - num_in_memory < num_keys(keys):
        # That is less to compute than was assumed: is it still worth it?
        wait_s = compute.wait_s(num_leading - num_in_memory)
        leading = some_keys(keys, slice(0, num_leading))
        again = store.lookup(leading, counted=False, max_wait_s=wait_s, timeout_s=timeout_s)
        if again.num_leading < num_leading:
            num_leading = num_in_memory
    return FoundBlocks(num_leading, num_in_memory)
