"""Checksums of tensors, computed in place on any device at about the speed of its memory.

A tensor's memory is read as rows of 1,024 words of 8 bytes. The checksum consists of the sums of all rows and the sums
of all columns, modulo 2^64. A change of one element changes one sum of each kind. Swapped rows change the row sums,
swapped columns the column sums. Remaining bytes at both ends of the memory are part of the checksum themselves.
"""

from __future__ import annotations

from collections import defaultdict

import torch

_WORD = 8
_COLUMNS = 1024


class Checksums:
    """Checksums of a list of tensors. It keeps their memory, so it does not notice if a tensor gets other memory."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._memories = [_memory(tensor) for tensor in tensors]

    def compute(self) -> list[torch.Tensor]:
        """Return one checksum per tensor, int64 `[n]` on the tensor's device, where n depends on the tensor's size."""
        return [torch.cat(_sums(memory)) for memory in self._memories]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether two results of `Checksums.compute` are equal. It makes one comparison per device, which may
    synchronize with the device."""
    pairs: defaultdict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for pair in zip(some, others, strict=True):
        pairs[pair[0].device].append(pair)
    return all(torch.equal(*map(torch.cat, zip(*group, strict=True))) for group in pairs.values())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first element to the last, including gaps between elements, as uint8 `[bytes]`."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    start = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), start, (num_bytes,), (1,))
    return memory


def _sums(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of rows, the sums of columns, and the remaining bytes, all int64."""
    head = -memory.storage_offset() % _WORD
    num_rows = (len(memory) - head) // (_WORD * _COLUMNS)
    if num_rows <= 0:
        return [memory.long()]
    end = head + num_rows * _WORD * _COLUMNS
    table = memory[head:end].view(torch.int64).view(num_rows, _COLUMNS)
    return [table.sum(1), table.sum(0), memory[:head].long(), memory[end:].long()]
