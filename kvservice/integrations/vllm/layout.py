"""Where the bytes of a block are in the K/V tensors of vLLM. They are copied as they are and never interpreted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import torch

from kvservice.errors import InvalidArgumentError

# The most ranges of memory that one layer's part of a block may have.
MAX_PIECES = 16


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

    def followed_by(self, other: _Piece) -> bool:
        return (
            other.address == self.address + self.num_bytes
            and other.stride == self.stride
            and self.num_bytes + other.num_bytes <= self.stride
        )


def block_layout(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> BlockLayout:
    """Find the blocks in the tensors that vLLM registers, one per layer. Layers that share a tensor are saved once.

    Raises InvalidArgumentError naming the layer, if its blocks cannot be found or are scattered too widely.
    """
    pieces: list[_Piece] = []
    descriptions = []
    seen = set()
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{type(tensor).__name__} is not one tensor", field=name)
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place not in seen:
            seen.add(place)
            of_layer, description = _layer_pieces(name, tensor, num_blocks)
            descriptions.append(description)
            for piece in of_layer:
                _append(pieces, piece)
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
