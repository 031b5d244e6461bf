"""Splitting of batches into requests that the daemon accepts."""

from __future__ import annotations

from collections.abc import Iterator

from kvservice.client.batches import OVERHEAD_BYTES
from kvservice.client.store.link import StoreLink
from kvservice.client.store.values import KEY_BYTES
from kvservice.errors import MessageTooLargeError

# Most bytes of blocks in one request. It bounds the time of a request, and how much is leased or reserved at a time.
REQUEST_BYTES = 256 << 20
# Most bytes of blocks in a message, unless one block is larger. Larger messages are slower: each of their copies is
# made in new memory.
MESSAGE_BYTES = 4 << 20
# Bytes of a piece of a block in a request: an offset.
OFFSET_BYTES = 8


def parts(count: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` of `count` things."""
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def keys_in_request(link: StoreLink) -> int:
    """Return how many keys a request may have."""
    return max(1, min(link.info.max_request_blocks, (link.info.max_message_bytes - OVERHEAD_BYTES) // KEY_BYTES))


def blocks_in_request(link: StoreLink, num_pieces: int = 1) -> int:
    """Return how many blocks a request may copy that has the offsets of this many pieces of each."""
    in_message = (link.info.max_message_bytes - OVERHEAD_BYTES) // (KEY_BYTES + OFFSET_BYTES * num_pieces)
    return max(1, min(link.info.max_request_blocks, REQUEST_BYTES // link.block_bytes, in_message))


def blocks_in_message(link: StoreLink) -> int:
    """Return how many blocks fit into a message. Raises MessageTooLargeError if not even one does."""
    most = (link.info.max_message_bytes - OVERHEAD_BYTES) // (KEY_BYTES + link.block_bytes)
    if most < 1:
        raise MessageTooLargeError(
            f"a block of {link.block_bytes} bytes, and its key, are more than a message may have, "
            f"{link.info.max_message_bytes} bytes: see the daemon's max_message_mib"
        )
    return min(most, link.info.max_request_blocks, max(1, MESSAGE_BYTES // link.block_bytes))
