"""The chain hashes of a prompt, and the index from chain hashes to blocks; see chain_hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvservice.blocks.plans import Int32Array
from kvservice.blocks.slices import Slices, finish
from kvservice.chain_hash import block_hash, root_hash

# Hashes of one slice, which takes a few milliseconds.
_SLICE_HASHES: Final = 2048


def token_bytes(token_ids: Int32Array) -> bytes:
    """Return the token ids as little-endian int32, on any machine."""
    return token_ids.astype("<i4", copy=False).tobytes()


def chain_hashes(token_ids: Int32Array, extra: Mapping[int, bytes], block_size: int) -> list[bytes]:
    """Return the chain hash of each full block of these tokens int32[n]. `extra` maps block numbers to extra keys."""
    return finish(chain_hashes_in_slices(token_ids, extra, block_size))


def chain_hashes_in_slices(token_ids: Int32Array, extra: Mapping[int, bytes], block_size: int) -> Slices[list[bytes]]:
    """Do as `chain_hashes`, in slices."""
    size = 4 * block_size
    data, parent = token_bytes(token_ids), root_hash(block_size)
    hashes: list[bytes] = []
    for first in range(0, len(data) - size + 1, size * _SLICE_HASHES):
        if first:
            yield
        for start in range(first, min(first + size * _SLICE_HASHES, len(data) - size + 1), size):
            parent = block_hash(parent, data[start : start + size], extra.get(start // size, b"") if extra else b"")
            hashes.append(parent)
    return hashes


def block_hashes(parent: bytes, tokens: Int32Array, extra: Mapping[int, bytes], first: int) -> list[bytes]:
    """Return the chain hashes of full blocks, of which tokens int32[n, block_size] are given and the first is block
    `first` of its sequence. `parent` is the hash before them."""
    size, data = 4 * tokens.shape[1], token_bytes(tokens)
    hashes: list[bytes] = []
    for entry, start in enumerate(range(0, len(data), size), start=first):
        parent = block_hash(parent, data[start : start + size], extra.get(entry, b"") if extra else b"")
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """Map from chain hashes to device blocks with that content. Each hash has one block, and each block one hash."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = root_hash(block_size)
        self.blocks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def match(self, token_ids: Int32Array, extra: Mapping[int, bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of these tokens, in order. It stops hashing at the first
        miss."""
        size = 4 * self.block_size
        data = token_bytes(token_ids)
        blocks, parent = self.blocks, self.root
        found: list[int] = []
        for entry, start in enumerate(range(0, len(data) - size + 1, size)):
            parent = block_hash(parent, data[start : start + size], extra.get(entry, b"") if extra else b"")
            block = blocks.get(parent)
            if block is None:
                break
            found.append(block)
        return found

    def match_hashes(self, chain_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that these chain hashes find, in order, up to the first miss."""
        if not chain_hashes or chain_hashes[0] not in self.blocks:
            return []
        found = list(map(self.blocks.get, chain_hashes))
        return found[: found.index(None)] if None in found else found  # type: ignore[return-value]  # without None
