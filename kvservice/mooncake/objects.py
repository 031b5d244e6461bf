"""Values as objects of a Mooncake Store: the bytes of the value, followed by a trailer that says which they are."""

from __future__ import annotations

import struct
from typing import Final

_MAGIC: Final = b"kvsblk\x00\x01"
_TRAILER = struct.Struct("<8sQQ32s8s")
TRAILER_BYTES: Final = _TRAILER.size
assert TRAILER_BYTES == 64, "the format is fixed"


def object_key(digest: bytes, key: bytes) -> str:
    return f"kvs/{digest.hex()}/{key.hex()}"


def keys_pattern(digest: bytes) -> str:
    """Return a regular expression for the keys of a space."""
    return f"^kvs/{digest.hex()}/"


def trailer(digest: bytes, block_bytes: int, key: bytes, checksum: int) -> bytes:
    return _TRAILER.pack(_MAGIC, block_bytes, checksum, key, digest[:8])


def checksum_in(found: bytes, digest: bytes, block_bytes: int, key: bytes) -> int | None:
    """Return the checksum in a trailer, or None if it is not the trailer of this value."""
    checksum: int = _TRAILER.unpack(found)[2]
    return checksum if found == trailer(digest, block_bytes, key, checksum) else None
