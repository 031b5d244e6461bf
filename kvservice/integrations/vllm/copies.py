"""The places of a block's bytes in the K/V tensors of vLLM, and their copies to and from the store. They are copied as
they are and never interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvservice.client import Scatter
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.vllm.steps import BlockIds, LeasedBlocks

Flags = npt.NDArray[np.bool_]
Statuses = npt.NDArray[np.uint8]
T = TypeVar("T")

# The most ranges of memory that one layer's part of a block may have.
MAX_PIECES = 16
# The most bytes of one call that copies before it returns.
CALL_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The pieces of a block, in the order in which they follow each other in a stored value.

    Piece p of block b are the `piece_bytes[p]` bytes of `memories[p]` (uint8, the memory of a tensor) from
    `starts[p] + b * strides[p]` on. `description` tells the order of the bytes in a block; it does not depend on the
    number of blocks or on addresses."""

    memories: tuple[torch.Tensor, ...]
    starts: tuple[int, ...]
    strides: tuple[int, ...]
    piece_bytes: tuple[int, ...]
    num_blocks: int
    description: str

    @property
    def block_bytes(self) -> int:
        return sum(self.piece_bytes)


@dataclass(frozen=True)
class _Piece:
    address: int
    stride: int
    num_bytes: int
    memory: torch.Tensor

    @property
    def place(self) -> tuple[int, int, int]:
        return self.address, self.stride, self.num_bytes

    def followed_by(self, other: _Piece) -> bool:
        return (
            other.address == self.address + self.num_bytes
            and other.stride == self.stride
            and self.num_bytes + other.num_bytes <= self.stride
        )


def block_layout(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], num_blocks: int) -> BlockLayout:
    """Find the blocks in the tensors that vLLM registers, one per layer, or the parts of a recurrent state. Memory that
    layers share, each for its own blocks, is saved once.

    Raises InvalidArgumentError naming the layer, if its blocks cannot be found or are scattered too widely, or if it
    shares memory with another one whose blocks are others.
    """
    pieces: list[_Piece] = []
    descriptions = []
    seen = set()
    used: set[tuple[int, int, int]] = set()
    for name, tensor in _each_tensor(kv_caches):
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place not in seen:
            seen.add(place)
            of_layer, description = _layer_pieces(name, tensor, num_blocks)
            descriptions.append(description)
            for piece in of_layer:
                if piece.place not in used:
                    used.add(piece.place)
                    _append(pieces, piece)
    pieces = _united(pieces)
    _check_apart([piece.place for piece in pieces], num_blocks)
    if not pieces:
        raise InvalidArgumentError("the model has no K/V caches", field="kv_caches")
    memories = tuple(_memory(piece.memory) for piece in pieces)
    return BlockLayout(
        memories=memories,
        starts=tuple(piece.address - memory.data_ptr() for piece, memory in zip(pieces, memories, strict=True)),
        strides=tuple(piece.stride for piece in pieces),
        piece_bytes=tuple(piece.num_bytes for piece in pieces),
        num_blocks=num_blocks,
        description="; ".join(f"{len(list(same))} x {text}" for text, same in groupby(descriptions)),
    )


def _each_tensor(kv_caches: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of each layer: one with K/V, or the parts of a recurrent state."""
    for name, tensors in kv_caches.items():
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgumentError(f"{type(tensor).__name__} is not one tensor", field=name)
            yield name, tensor


def _united(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Return the pieces, with one in place of those that share memory and have the same stride: a block of K/V in one
    group, and a recurrent state of other sizes in the same block of another. The order is that of the layers, which is
    the same in every process."""
    united: list[tuple[int, _Piece]] = []
    for order, piece in sorted(enumerate(pieces), key=lambda each: each[1].address):
        if united:
            first, last = united[-1]
            size = max(last.num_bytes, piece.address + piece.num_bytes - last.address)
            if piece.address < last.address + last.num_bytes and piece.stride == last.stride >= size:
                united[-1] = min(first, order), _Piece(last.address, last.stride, size, last.memory)
                continue
        united.append((order, piece))
    return [piece for _, piece in sorted(united, key=lambda each: each[0])]


def _check_apart(places: Iterable[tuple[int, int, int]], num_blocks: int) -> None:
    """Raise InvalidArgumentError if pieces overlap in the first block or in the last."""
    for block in (0, num_blocks - 1):
        ranges = sorted((at + block * stride, at + block * stride + size) for at, stride, size in places)
        if any(start < stop for (_, stop), (start, _) in pairwise(ranges)):
            raise InvalidArgumentError("layers share memory, and their blocks differ", field="kv_caches")


def _append(pieces: list[_Piece], piece: _Piece) -> None:
    """Append a piece, or extend the last one if both are one range of memory in every block."""
    if pieces and pieces[-1].followed_by(piece):
        last = pieces.pop()
        piece = _Piece(last.address, last.stride, last.num_bytes + piece.num_bytes, last.memory)
    pieces.append(piece)


def _layer_pieces(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[list[_Piece], str]:
    """Return the pieces of a layer in the order of their addresses, and a description of the order of its bytes."""
    axis = _block_axis(name, tensor.shape, num_blocks)
    sizes = list(tensor.shape)
    sizes[axis] //= num_blocks
    num_bytes = tensor.element_size()
    steps = [step * num_bytes for step in tensor.stride()]
    stride = steps[axis] * sizes[axis]
    axes = sorted(each for each in zip(steps, sizes, range(len(sizes)), strict=True) if each[1] > 1)
    outer: list[tuple[int, int]] = []
    for step, size, _ in axes:
        if step == num_bytes and not outer:
            num_bytes *= size
        else:
            outer.append((step, size))
    pieces = [
        _Piece(tensor.data_ptr() + sum(at), stride, num_bytes, tensor)
        for at in product(*(range(0, step * size, step) for step, size in reversed(outer)))
    ]
    if len(pieces) > MAX_PIECES or num_bytes > stride:
        raise InvalidArgumentError(f"a block has {len(pieces)} pieces, more than {MAX_PIECES}", field=name)
    order = ",".join(f"{index}:{size}" for _, size, index in reversed(axes))
    return pieces, f"{str(tensor.dtype).removeprefix('torch.')}[{order}]"


def _block_axis(name: str, shape: Sequence[int], num_blocks: int) -> int:
    """Return the axis of the blocks: the first, or the second after K and V. A block can be several entries."""
    for axis in (0, 1):
        if len(shape) > axis and shape[axis] >= num_blocks and shape[axis] % num_blocks == 0:
            return axis
    raise InvalidArgumentError(f"no axis of the shape {list(shape)} has {num_blocks} blocks", field=name)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor's storage as uint8 `[bytes]`."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


@dataclass(frozen=True)
class StepRead:
    """A copy that computations wait for. `wait` waits for its end, and returns which blocks are right; `right` says it
    if the copy has ended already."""

    wait: Callable[[], Flags]
    right: Flags | None = None

    @staticmethod
    def ended(right: Flags) -> StepRead:
        return StepRead(lambda: right, right)


class BlockCopier(Protocol):
    """Copies blocks of vLLM to and from a store of the client. One thread calls `get` and `fetch`, one `put`, and one
    `read`.

    `get`, `fetch` and `put` may return before the copy has ended, and the next copy may start then. The blocks are in
    use until the result is there. `call_bytes` are about the most bytes of one call of these, one block at least.
    """

    call_bytes: int
    verifies: bool
    """Whether `get` compares checksums, which the others do not."""

    def use(self, memory: Any) -> None:
        """Prepare for copies from and to this memory of the store, a MappedStore; None: it is not mapped."""

    def mark(self) -> Any:
        """Return what copies wait for: the computations that are queued now. Any thread may call this."""

    def get(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Flags]:
        """Fill blocks. The result is which of them are right."""

    def fetch(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds, mark: Any) -> Future[Flags]:
        """Fill blocks from the memory of the store. The result is which of them are right."""

    def put(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Statuses]:
        """Store blocks. The result is the PutStatus of each."""

    def read(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds) -> StepRead:
        """Fill blocks from the memory of the store for the computations that are queued from now on, which wait for
        them."""

    def close(self) -> None:
        """Wait for all copies, and free what they used."""


class HostCopier:
    """Copies between the store and blocks in host memory, without a copy in between."""

    call_bytes = CALL_BYTES

    def __init__(self, layout: BlockLayout, *, verify: bool) -> None:
        self._layout, self.verifies = layout, verify
        self._starts = np.array(layout.starts, np.int64)
        self._strides = np.array(layout.strides, np.int64)

    def use(self, memory: Any) -> None:
        """Nothing has to be prepared."""

    def mark(self) -> None:
        return None

    def get(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Flags]:  # noqa: ARG002
        return done(store.get(keys, self._places(block_ids), verify=self.verifies))

    def fetch(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds, mark: Any) -> Future[Flags]:  # noqa: ARG002
        return done(memory.read(leased.offsets, leased.versions, self._places(block_ids)))

    def put(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Statuses]:  # noqa: ARG002
        return done(store.put(keys, self._places(block_ids)))

    def read(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds) -> StepRead:
        return StepRead.ended(memory.read(leased.offsets, leased.versions, self._places(block_ids)))

    def close(self) -> None:
        """Nothing is in use between calls."""

    def _places(self, block_ids: BlockIds) -> Scatter:
        offsets = self._starts + block_ids[:, None] * self._strides
        return Scatter(self._layout.memories, offsets, self._layout.piece_bytes)


def done(result: T) -> Future[T]:
    """Return a future that has this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
