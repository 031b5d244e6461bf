"""Values as objects of a Mooncake Store: the bytes of the value, followed by a trailer that says which they are."""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_MAGIC: Final = b"kvsblk\x00\x01"
# The magic, the size of the value, its checksum, its key, and the start of the digest.
_TRAILER = struct.Struct("<8sQQ32s8s")
TRAILER_BYTES: Final = _TRAILER.size
assert TRAILER_BYTES == 64, "the format is fixed"
_CHECKSUM, _KEY = slice(16, 24), slice(24, 56)


def object_key(digest: bytes, key: bytes) -> str:
    return f"kvs/{digest.hex()}/{key.hex()}"


def keys_pattern(digest: bytes) -> str:
    """Return a regular expression for the keys of a space."""
    return f"^kvs/{digest.hex()}/"


def trailers(digest: bytes, block_bytes: int, keys: bytes, checksums: bytes) -> Bytes:
    """Return the trailers of values, uint8 `[num_values, TRAILER_BYTES]`. `keys` and `checksums` are packed."""
    common = _TRAILER.pack(_MAGIC, block_bytes, 0, b"", digest[:8])
    made = np.tile(np.frombuffer(common, np.uint8), (len(checksums) // 8, 1))
    made[:, _CHECKSUM] = np.frombuffer(checksums, np.uint8).reshape(-1, 8)
    made[:, _KEY] = np.frombuffer(keys, np.uint8).reshape(-1, 32)
    return made
