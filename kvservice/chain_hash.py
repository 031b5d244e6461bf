"""Chain hashes of blocks, which the daemon and routers in front of several daemons compute: 32 bytes identify a block's
content and all content before it (vLLM's automatic prefix caching)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import sha256

# The prefix of each extra key in the hash input.
_OFFSET_AND_SIZE = struct.Struct("<II")


def root_hash(block_size: int) -> bytes:
    """Return the parent hash of every first block. It depends on the block size, so chains of two sizes never match."""
    return sha256(b"kvservice chain root, block size %d" % block_size).digest()


def block_hash(parent: bytes, token_bytes: bytes, extra: bytes = b"") -> bytes:
    """Return SHA-256 over the parent's hash, the token ids as little-endian int32 and the encoded extra keys."""
    return sha256(parent + token_bytes + extra).digest()


def encoded_extra_keys(pairs: Iterable[tuple[int, bytes]], block_size: int) -> dict[int, bytes]:
    """Map each block number to the length-prefixed keys at its positions, sorted by (position, key)."""
    by_block: dict[int, list[bytes]] = {}
    for position, key in sorted(pairs):
        pieces = by_block.setdefault(position // block_size, [])
        pieces += (_OFFSET_AND_SIZE.pack(position % block_size, len(key)), key)
    return {block: b"".join(pieces) for block, pieces in by_block.items()}
