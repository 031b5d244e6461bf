"""Keys of the store from keys of an engine."""

from __future__ import annotations

import hashlib

from kvservice.client.store.values import KEY_BYTES


def digest_key(engine: str, *parts: object) -> bytes:
    """Return a key of 32 bytes: the SHA-256 of the engine's name and of the parts of its key, each with its length."""
    state = hashlib.sha256()
    for part in (f"kvservice key of {engine}", *parts):
        data = str(part).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def hexadecimal_key(engine: str, key: str) -> bytes:
    """Return the bytes of a key that is 64 lower-case hexadecimal digits, and the digest of any other."""
    try:
        data = bytes.fromhex(key)
    except ValueError:
        data = b""
    return data if len(data) == KEY_BYTES and data.hex() == key else digest_key(engine, key)
