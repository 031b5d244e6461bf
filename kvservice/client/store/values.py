"""The values of the store's API: namespaces, keys, the results of calls, and the places of blocks in the memory of this
process: one array, or pieces scattered over arrays."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.client.messages import build, whole
from kvservice.client.tensors import Tensor, host_address
from kvservice.client.values import from_message
from kvservice.errors import InternalError, InvalidArgumentError
from kvservice.v1 import store_pb2

KEY_BYTES = 32
# The fields of a namespace that are texts, and the numbers above 0. Its ranks are 0 or more.
TEXTS = ("model", "weights", "dtype", "layout", "key_algorithm")
SIZES = ("block_bytes", "tp_size", "pp_size")
Keys: TypeAlias = "bytes | Sequence[bytes]"
"""Keys of 32 bytes each: one after the other in one `bytes`, or a sequence of them."""
Flags: TypeAlias = npt.NDArray[np.bool_]
Statuses: TypeAlias = npt.NDArray[np.uint8]
"""A PutStatus per key."""


@dataclass(frozen=True)
class StoreNamespace:
    """The properties, besides its key, that the bytes of a block depend on; see StoreNamespace in store.proto.

    Namespaces that differ in any field, or whose stores have another tenant, share no blocks. `block_bytes` is the size
    of every value.
    """

    model: str
    block_bytes: int
    weights: str = ""
    dtype: str = ""
    layout: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    key_algorithm: str = ""

    @staticmethod
    def of(message: store_pb2.StoreNamespace) -> StoreNamespace:
        return from_message(StoreNamespace, message)

    def message(self) -> store_pb2.StoreNamespace:
        """Raises InvalidArgumentError naming a field with a value of the wrong type or range."""
        fields = dataclasses.asdict(self)
        for name, value in fields.items():
            if name in TEXTS:
                if not isinstance(value, str):
                    raise InvalidArgumentError(f"is {type(value).__name__}, not str", field=name)
            elif whole(value, name) < (1 if name in SIZES else 0):
                raise InvalidArgumentError(f"{value} is too small", field=name)
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            if fields[rank] >= fields[size]:
                raise InvalidArgumentError(f"{fields[rank]} is not below {size}, {fields[size]}", field=rank)
        return build(store_pb2.StoreNamespace, **fields)


class PutStatus(enum.IntEnum):
    """The result of `put` or `reserve` for one block."""

    DONE = store_pb2.PUT_STATUS_DONE
    """It is stored now, or room is reserved for it."""
    PRESENT = store_pb2.PUT_STATUS_PRESENT
    """It was there already."""
    BEING_WRITTEN = store_pb2.PUT_STATUS_BEING_WRITTEN
    """Another writer has reserved it, or it is the same key as an earlier one in the batch."""
    NO_ROOM = store_pb2.PUT_STATUS_NO_ROOM
    """All blocks are leased or reserved. A batch does not evict its own blocks."""
    UNREACHABLE = 255
    """The daemon did not answer. It may still have stored the block."""


# The status of a block that did not arrive as it was sent. It is sent again in a message, so no caller sees it.
DAMAGED = store_pb2.PUT_STATUS_DAMAGED


@dataclass(frozen=True, eq=False)
class Lookup:
    """Result of a lookup: `found` has a flag per key, `num_leading` counts the keys before the first missing one, and
    `num_in_memory` those before the first one whose block is not in the daemon's memory, but below it or nowhere."""

    num_leading: int
    found: Flags
    num_in_memory: int

    @staticmethod
    def of(found: Flags, num_in_memory: int) -> Lookup:
        return Lookup(num_leading(found), found, num_in_memory)


# The most keys that `missing` of SharedUses may have.
MAX_MISSING = 256


@dataclass
class SharedUses:
    """Blocks that a process has looked up in the mapped memory and found, or not found, and that it has read there. Of
    each look-up that missed a block: the first missing key in `missing`, of which the daemon counts the reason, or one
    more in `not_whole`, if other ranks or groups have their parts of that block. `engine` replaces its last report:
    figures of an engine since its start, by the names of EngineReport of the contract."""

    hits: int = 0
    misses: int = 0
    read: int = 0
    missing: list[bytes] = field(default_factory=list)
    not_whole: int = 0
    engine: Mapping[str, int] | None = None

    def add_missing(self, key: bytes) -> None:
        if len(self.missing) < MAX_MISSING:
            self.missing.append(key)


def key_bytes(keys: Any) -> bytes:
    """Return the keys one after the other. Raises InvalidArgumentError."""
    if isinstance(keys, bytes):
        if len(keys) % KEY_BYTES:
            raise InvalidArgumentError(f"{len(keys)} bytes are not a multiple of {KEY_BYTES}", field="keys")
        return keys
    if not isinstance(keys, Sequence) or isinstance(keys, (str, bytearray, memoryview)):
        raise InvalidArgumentError(f"is {type(keys).__name__}, not bytes or a sequence of bytes", field="keys")
    for number, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidArgumentError(f"key {number} is {what}, must be {KEY_BYTES} bytes", field="keys")
    return b"".join(keys)


def num_keys(keys: bytes) -> int:
    return len(keys) // KEY_BYTES


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def distinct_keys(gathered: Iterable[bytes], most: int) -> bytes:
    """Return the keys of these in their order, each once, and no more than `most`."""
    distinct: dict[bytes, None] = {}
    for keys in gathered:
        distinct.update(dict.fromkeys(split_keys(keys)))
        if len(distinct) >= most:
            break
    return b"".join(itertools.islice(distinct, most))


def some_keys(keys: bytes, part: slice) -> bytes:
    return keys[KEY_BYTES * part.start : KEY_BYTES * part.stop]


def chosen_keys(keys: bytes, chosen: npt.NDArray[Any]) -> bytes:
    """`chosen`: a flag per key, or the places of some keys."""
    some: npt.NDArray[np.uint8] = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)[chosen]
    return some.tobytes()


def num_leading(flags: Flags) -> int:
    """Return how many are set before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def flags_of(bitmap: bytes, count: int) -> Flags:
    """Convert a bitmap, the lowest bit of a byte first. Raises InternalError if it has another size."""
    if len(bitmap) != -(-count // 8):
        raise InternalError(f"the daemon has sent a bitmap of {len(bitmap)} bytes for {count} keys")
    if not count:
        return np.zeros(0, np.bool_)
    return np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little").view(np.bool_)


def bitmap_of(flags: Flags) -> bytes:
    return np.packbits(flags, bitorder="little").tobytes()


def statuses_of(statuses: bytes, count: int) -> Statuses:
    """Convert the statuses of a response. Raises InternalError unless there is one per key."""
    array = np.frombuffer(statuses, np.uint8)
    if len(array) != count:
        raise InternalError(f"the daemon has sent {len(array)} statuses for {count} keys")
    return array.copy()


# ---- places of blocks


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
