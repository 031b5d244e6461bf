"""Copies between packed blocks and their pieces, by native threads without the interpreter lock."""

from __future__ import annotations

import numpy as np

from kvservice import _ext
from kvservice.client.store.pieces import Numbers, Pieces
from kvservice.client.store.values import Flags, flags_of
from kvservice.errors import InternalError


def copy_out(
    address: int, offsets: bytes, block_bytes: int, target: Pieces, num_threads: int, checksums: bytes = b""
) -> Flags:
    """Copy the blocks at `offsets` from `address` to their pieces. Returns which of them have the expected checksums;
    all if none are given. The caller has checked that all blocks lie in memory of this process."""
    _check(offsets, target)
    if not offsets:
        return np.ones(0, np.bool_)
    start, places = _places(target)
    right = _ext.store_copy_out(
        address, offsets, block_bytes, start, places, target.sizes.tobytes(), checksums, num_threads
    )
    return flags_of(right, len(target.addresses))


def copy_in(address: int, offsets: bytes, block_bytes: int, source: Pieces, num_threads: int) -> bytes:
    """Copy blocks from their pieces, see `copy_out`. Returns their checksums."""
    _check(offsets, source)
    if not offsets:
        return b""
    start, places = _places(source)
    return _ext.store_copy_in(address, offsets, block_bytes, start, places, source.sizes.tobytes(), num_threads)


def _places(pieces: Pieces) -> tuple[int, bytes]:
    """Return the lowest address of the pieces, and their offsets from it."""
    lowest = pieces.addresses.min()
    return int(lowest), (pieces.addresses - lowest).tobytes()


def packed(num_blocks: int, block_bytes: int) -> Numbers:
    """Return the offsets of blocks that lie one after the other."""
    return np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)


def _check(offsets: bytes, pieces: Pieces) -> None:
    if len(offsets) != 8 * len(pieces.addresses):
        raise InternalError(f"the daemon names {len(offsets) // 8} blocks of {len(pieces.addresses)}")
