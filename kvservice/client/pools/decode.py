"""The tables of a decode step at fixed addresses, so that a CUDA graph can read them. They move on by themselves."""

from __future__ import annotations

import numpy as np
import torch

from kvservice.client.cuda import current_stream, extension
from kvservice.client.pools.tables import ALIGNMENT
from kvservice.errors import InvalidArgumentError
from kvservice.wire.tensors import Array

# Makes any slot negative. Kernels write nothing to negative slots.
_NOWHERE = -(1 << 48)


class DecodeTables:
    """The next token of each sequence, as `kvservice.ops` takes it. Sequence i is in row i.

    block_tables  int32[max_sequences, max_blocks]
    context_lens  int32[max_sequences]
    query_lens    int32[max_sequences], all 1
    slot_mapping  int64[max_sequences]
    positions     int64[max_sequences], the position of the token in its sequence, from 0

    Rows without a sequence write nowhere, and attend to one token of block 0. Their results mean nothing.
    """

    def __init__(self, max_sequences: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        # Everything that the host writes is in one piece of memory, and is copied at once: positions, how much they
        # grow in a step, what is added to slots, and the block tables.
        self._shape = max_sequences, max_blocks
        self._begin = -(-24 * max_sequences // ALIGNMENT) * ALIGNMENT  # of the block tables
        num_bytes = self._begin + 4 * max_sequences * max_blocks
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.positions, self._growth, self._shift, self.block_tables = self._parts(self._memory)
        self.query_lens = torch.ones(max_sequences, dtype=torch.int32, device=device)
        self.context_lens = self.query_lens.clone()
        self.slot_mapping = torch.full((max_sequences,), -1, dtype=torch.int64, device=device)
        self.clear()

    def _parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, max_blocks = self._shape
        numbers = memory[: 24 * rows].view(torch.int64).view(3, rows)
        positions, growth, shift = numbers
        return positions, growth, shift, memory[self._begin :].view(torch.int32).view(rows, max_blocks)

    def load(self, block_tables: Array, lengths: Array) -> None:
        """Set the sequences: block_tables int32[n, blocks], and the tokens before the next one, lengths int64[n]. The
        copies run on the current stream. Raises InvalidArgumentError."""
        memory, parts = self._host_copy(block_tables)
        positions, growth, shift, _ = parts
        num_seqs = len(lengths)
        positions.zero_()
        positions[:num_seqs] = torch.from_numpy(np.asarray(lengths, np.int64)) - 1  # `advance` adds 1
        growth.zero_()
        growth[:num_seqs] = 1
        shift.fill_(_NOWHERE)
        shift[:num_seqs] = 0
        self._memory.copy_(memory, non_blocking=True)

    def clear(self) -> None:
        """Set no sequences: `advance` moves nothing on, and its slots are nowhere."""
        self.load(np.zeros((0, 0), np.int32), np.zeros(0, np.int64))

    def load_blocks(self, block_tables: Array) -> None:
        """Set the block tables only, int32[n, blocks]. Raises InvalidArgumentError."""
        _, (*_, tables) = self._host_copy(block_tables)
        self.block_tables.copy_(tables, non_blocking=True)

    def _host_copy(self, block_tables: Array) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return memory to copy from, with the block tables in it, and its parts. It is new each time, because copies
        from the last one may still be queued; torch keeps pinned memory until they are done."""
        num_seqs, num_blocks = block_tables.shape
        if num_seqs > self._shape[0] or num_blocks > self._shape[1]:
            raise InvalidArgumentError(
                f"are {num_seqs} with up to {num_blocks} blocks, more than {self._shape[0]} with {self._shape[1]}",
                field="sequences",
            )
        memory = torch.empty(self._memory.shape, dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        parts = self._parts(memory)
        parts[-1].zero_()
        parts[-1][:num_seqs, :num_blocks] = torch.from_numpy(np.ascontiguousarray(block_tables))
        return memory, parts

    def advance(self) -> None:
        """Go to the next token of each sequence. Can be captured. The slot is looked up here, and not a step before, so
        that block tables that were loaded in between have it."""
        if self._memory.is_cuda:
            self._advance_on_gpu()
            return
        self.positions.add_(self._growth)
        torch.add(self.positions, 1, out=self.context_lens)
        blocks = self.block_tables.gather(1, (self.positions // self._block_size)[:, None])[:, 0]
        torch.add(self.positions % self._block_size, blocks, alpha=self._block_size, out=self.slot_mapping)
        self.slot_mapping.add_(self._shift)

    def _advance_on_gpu(self) -> None:
        """The same in one kernel: the seven above take longer to start than to run."""
        device = self._memory.device
        arrays = self.positions, self._growth, self._shift, self.block_tables, self.context_lens, self.slot_mapping
        addresses = (array.data_ptr() for array in arrays)
        with torch.cuda.device(device):
            extension().advance_tables(*addresses, *self._shape, self._block_size, current_stream(device.index))
