"""What is asked for at once, cut into what one request may be about."""

from __future__ import annotations

from collections.abc import Iterator

from kvservice.client.values import PoolInfo, SequenceInfo

# What surrounds the tensors of a message, generously.
OVERHEAD_BYTES = 4096


def id_batches(ids: list[int], info: PoolInfo) -> Iterator[list[int]]:
    """As many at a time as one request may name."""
    for first in range(0, len(ids), info.max_request_sequences):
        yield ids[first : first + info.max_request_sequences]


def token_parts(num_tokens: int, token_bytes: int, info: PoolInfo) -> list[tuple[int, int]]:
    """First token and the one after the last of each part, where as many as fit into a message go together. One part,
    where all do, or not even one does."""
    most = (info.max_message_bytes - OVERHEAD_BYTES) // max(1, token_bytes)
    if most < 1:
        return [(0, num_tokens)]
    return [(first, min(first + most, num_tokens)) for first in range(0, num_tokens, most)] or [(0, 0)]


def describable_batches(infos: list[SequenceInfo], info: PoolInfo) -> Iterator[list[int]]:
    """Ids of the sequences, in batches whose tokens and blocks one answer may tell."""
    batch: list[int] = []
    tokens = blocks = 0
    for one in infos:
        tokens, blocks = tokens + one.length, blocks + one.num_blocks
        full = tokens > info.max_request_tokens or blocks > info.max_request_blocks
        if batch and (full or len(batch) == info.max_request_sequences):
            yield batch
            batch, tokens, blocks = [], one.length, one.num_blocks
        batch.append(one.sequence_id)
    if batch:
        yield batch
