"""The places of blocks in a region or in a message, see Scatter in the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.errors import InvalidArgumentError
from kvservice.v1 import store_pb2

Uint64Array = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Places:
    """Pieces of `piece_bytes` uint64 `[num_pieces]` bytes at `offsets` uint64 `[num_blocks][num_pieces]`."""

    piece_bytes: Uint64Array
    offsets: Uint64Array

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    def packed(num_blocks: int, block_bytes: int) -> Places:
        """Blocks of one piece, one after the other."""
        offsets = np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        return Places(np.array([block_bytes], np.uint64), offsets[:, None])

    def of(self, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Places:
        """The places of chosen blocks, bool `[num_blocks]`."""
        return Places(self.piece_bytes, self.offsets[chosen])

    def ranges(self) -> Iterator[tuple[np.uint64, np.uint64]]:
        """The offset and size of each piece, block by block."""
        sizes = np.broadcast_to(self.piece_bytes, self.offsets.shape)
        return zip(self.offsets.reshape(-1), sizes.reshape(-1), strict=True)


def places_of(message: store_pb2.Scatter, num_blocks: int, block_bytes: int, region_bytes: int) -> Places:
    """Return the places of all blocks inside a region of `region_bytes`. Raises InvalidArgumentError naming
    region.piece_bytes or region.offsets."""
    pieces = list(message.piece_bytes) or [block_bytes]
    if sum(pieces) != block_bytes or 0 in pieces:
        raise InvalidArgumentError(
            f"sum up to {sum(pieces)}, or one is 0; a block has {block_bytes} bytes", field="region.piece_bytes"
        )
    data = message.offsets
    if len(data) != 8 * num_blocks * len(pieces):
        raise InvalidArgumentError(
            f"{len(data)} bytes, {num_blocks} blocks of {len(pieces)} pieces need {8 * num_blocks * len(pieces)}",
            field="region.offsets",
        )
    piece_bytes = np.array(pieces, np.uint64)
    offsets = np.frombuffer(data, "<u8").reshape(num_blocks, len(pieces))
    # The last valid offset of each piece; -1 if the region is smaller than the piece.
    last = region_bytes - piece_bytes.astype(np.int64)
    if num_blocks and (last.min() < 0 or (offsets.max(axis=0) > last.astype(np.uint64)).any()):
        raise InvalidArgumentError(f"a piece ends outside the region of {region_bytes} bytes", field="region.offsets")
    return Places(piece_bytes, offsets)
