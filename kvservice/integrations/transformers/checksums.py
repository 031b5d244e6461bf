"""Checksums of tensors where they are, on any device, at about the speed of its memory.

A tensor's memory is read as rows of 1,024 words of 8 bytes. Its checksum is the sum of every row and the sum of every
column, modulo 2^64. A change of one element changes one of each; rows or columns that change places change the other
sums. What is left over at both ends of the memory is part of the checksum as it is.
"""

from __future__ import annotations

from collections import defaultdict

import torch

_WORD = 8
_COLUMNS = 1024


class Checksums:
    """Of some tensors. It reads their memory, so it does not notice that a tensor got other memory."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._memories = [_memory(tensor) for tensor in tensors]

    def compute(self) -> list[torch.Tensor]:
        """One checksum for each tensor, of dtype int64, on its device; [number of values], which the size decides."""
        return [torch.cat(_sums(memory)) for memory in self._memories]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two results of `Checksums.compute` are equal; one comparison for each device, which may have to wait."""
    pairs: defaultdict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for pair in zip(some, others, strict=True):
        pairs[pair[0].device].append(pair)
    return all(torch.equal(*map(torch.cat, zip(*group, strict=True))) for group in pairs.values())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first element to the last, with those between that belong to others; uint8 [bytes]."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    start = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), start, (num_bytes,), (1,))
    return memory


def _sums(memory: torch.Tensor) -> list[torch.Tensor]:
    """Sums of rows, sums of columns, bytes that are left; int64."""
    head = -memory.storage_offset() % _WORD
    num_rows = (len(memory) - head) // (_WORD * _COLUMNS)
    if num_rows <= 0:
        return [memory.long()]
    end = head + num_rows * _WORD * _COLUMNS
    table = memory[head:end].view(torch.int64).view(num_rows, _COLUMNS)
    return [table.sum(1), table.sum(0), memory[:head].long(), memory[end:].long()]
