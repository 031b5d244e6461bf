"""The places of blocks in the memory of this process: one array, or pieces scattered over arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.client.requests import whole
from kvservice.client.store.values import Flags
from kvservice.client.tensors import Tensor, host_address
from kvservice.errors import InvalidArgumentError

Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Scatter:
    """Blocks in several pieces each, for example one per layer.

    Piece p of block i is at byte `offsets[i][p]` of `base`, and has `piece_bytes[p]` bytes; these sum up to the size of
    a block. `base` is a contiguous array of NumPy or torch in host memory, of any shape and dtype; or a sequence with
    one array per piece, as engines have one per layer. `offsets` are whole numbers `[num_blocks, num_pieces]`.
    """

    base: Tensor | Sequence[Tensor]
    offsets: npt.ArrayLike
    piece_bytes: Sequence[int]


Blocks = Tensor | Scatter
"""uint8[num_blocks, block_bytes] of NumPy or torch, contiguous and in host memory; or a Scatter."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """The addresses `[num_blocks, num_pieces]` of pieces with `sizes` bytes `[num_pieces]`. `owner` keeps the memory
    alive."""

    addresses: Numbers
    sizes: Numbers
    owner: Any

    def part(self, part: slice | Flags) -> Pieces:
        """Return those of some blocks."""
        return Pieces(self.addresses[part], self.sizes, self.owner)

    def view(self) -> memoryview | None:
        """Return the bytes of all blocks if they lie one after the other, otherwise None."""
        size = int(self.sizes[0])
        if len(self.sizes) > 1 or (np.diff(self.addresses[:, 0]) != size).any():
            return None
        return memoryview((ctypes.c_uint8 * (size * len(self.addresses))).from_address(int(self.addresses[0, 0])))

    def offsets_in(self, address: int, num_bytes: int) -> Numbers | None:
        """Return the offsets of the pieces in a range of memory, or None if any of them is not inside."""
        offsets = self.addresses - np.uint64(address)  # wraps around below the address
        inside = (offsets < num_bytes) & (offsets + self.sizes <= num_bytes)
        return offsets if inside.all() else None


def pieces_of(blocks: Blocks, num_blocks: int, block_bytes: int, field: str, *, writable: bool) -> Pieces:
    """Check where `num_blocks` blocks are. Raises InvalidArgumentError naming `field`."""
    if not isinstance(blocks, Scatter):
        return _pieces_of_array(blocks, num_blocks, block_bytes, field, writable)
    sizes = _sizes(blocks.piece_bytes, block_bytes, field)
    bases = list(blocks.base) if isinstance(blocks.base, (list, tuple)) else [blocks.base] * len(sizes)
    if len(bases) != len(sizes):
        raise InvalidArgumentError(f"{len(bases)} arrays for {len(sizes)} pieces", field=field)
    offsets = _offsets(blocks.offsets, (num_blocks, len(sizes)), field)
    starts = np.array([_address(base, field, writable) for base in bases], np.uint64)
    if not num_blocks:
        return Pieces(offsets, sizes, bases)
    room = np.array([_room(base, size, field) for base, size in zip(bases, sizes.tolist(), strict=True)], np.uint64)
    if (offsets > room).any():
        raise InvalidArgumentError("a piece is not inside its array", field=field)
    return Pieces(offsets + starts, sizes, bases)


def array_pieces(address: int, num_blocks: int, block_bytes: int, owner: Any) -> Pieces:
    """Return the places of blocks that lie one after the other."""
    starts = np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes) + np.uint64(address)
    return Pieces(starts[:, None], np.array([block_bytes], np.uint64), owner)


def _pieces_of_array(array: Tensor, num_blocks: int, block_bytes: int, field: str, writable: bool) -> Pieces:
    address = _address(array, field, writable)
    shape, wanted = tuple(array.shape), (num_blocks, block_bytes)
    if shape != wanted or str(array.dtype).removeprefix("torch.") != "uint8":
        raise InvalidArgumentError(f"is {array.dtype}{list(shape)}, must be uint8{list(wanted)}", field=field)
    return array_pieces(address, num_blocks, block_bytes, array)


def _address(array: Tensor, field: str, writable: bool) -> int:
    address = host_address(array, field)
    if writable and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise InvalidArgumentError("is read-only", field=field)
    return address


def _sizes(piece_bytes: Any, block_bytes: int, field: str) -> Numbers:
    if not isinstance(piece_bytes, Iterable):
        raise InvalidArgumentError(f"piece_bytes is {type(piece_bytes).__name__}, not a sequence", field=field)
    sizes = [whole(size, field) for size in piece_bytes]
    if sum(sizes) != block_bytes or min(sizes, default=0) < 1:
        raise InvalidArgumentError(f"the pieces have {sizes} bytes, a block has {block_bytes}", field=field)
    return np.array(sizes, np.uint64)


def _offsets(offsets: npt.ArrayLike, shape: tuple[int, int], field: str) -> Numbers:
    array = np.asarray(offsets)
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(
            f"the offsets are {array.dtype}{list(array.shape)}, must be whole numbers {list(shape)}", field=field
        )
    if array.size and array.min() < 0:
        raise InvalidArgumentError("an offset is negative", field=field)
    return array.astype(np.uint64)


def _room(base: Tensor, size: int, field: str) -> int:
    """Return the largest offset of a piece."""
    host_address(base, field)
    room = int(base.nbytes) - size
    if room < 0:
        raise InvalidArgumentError(f"an array has {base.nbytes} bytes, a piece {size}", field=field)
    return room
