"""The daemon's limits: checks, and splitting of large operations into requests that stay within them."""

from __future__ import annotations

from collections.abc import Iterator

from kvservice.client.values import PoolInfo, SequenceInfo
from kvservice.errors import MessageTooLargeError

# Upper bound on the bytes of a message besides its tensors.
OVERHEAD_BYTES = 4096


def fits(num_bytes: int, message_bytes: int) -> bool:
    """Return whether tensors of this many bytes fit into a message."""
    return num_bytes + OVERHEAD_BYTES <= message_bytes


def check_size(num_bytes: int, field: str, info: PoolInfo) -> None:
    """Raise MessageTooLargeError if the daemon would refuse a message of this size."""
    if not fits(num_bytes, info.max_message_bytes):
        raise MessageTooLargeError(f"{num_bytes} bytes, a message may have {info.max_message_bytes}", field=field)


def id_batches(ids: list[int], info: PoolInfo) -> Iterator[list[int]]:
    """Split the ids into batches of at most `max_request_sequences`."""
    for first in range(0, len(ids), info.max_request_sequences):
        yield ids[first : first + info.max_request_sequences]


def token_parts(num_tokens: int, token_bytes: int, message_bytes: int) -> list[tuple[int, int]]:
    """Split tokens into parts (first, stop), each with as many tokens as fit into a message. Returns one part if all
    tokens fit, or if not even one does."""
    most = (message_bytes - OVERHEAD_BYTES) // max(1, token_bytes)
    if most < 1:
        return [(0, num_tokens)]
    return [(first, min(first + most, num_tokens)) for first in range(0, num_tokens, most)] or [(0, 0)]


def describable_batches(infos: list[SequenceInfo], info: PoolInfo) -> Iterator[list[int]]:
    """Yield the ids in batches whose tokens and blocks are within the limits of one request."""
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
