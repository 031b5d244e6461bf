"""The Transfer Engine alone, between two processes: what it costs to move bytes with it, before anything is compared,
copied or answered."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvservice.bench.store_blocks import BlockBatch
from kvservice.transfer import READ, WRITE, Endpoint, Operation, Range, TransferProcess

_LOOPBACK: Final = "127.0.0.1"
# The engine moves parts of this size at the same time, as it does for the daemon.
_PART_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 60.0


class EnginePeer:
    """One engine reads the blocks of a batch from the memory of the other, and writes them back to its `out`. The first
    one is where the daemon would be. It calls, and does not listen."""

    def __init__(self, calling: TransferProcess, listening: TransferProcess, batch: BlockBatch) -> None:
        """The memory of `listening` has `values` and then `out`."""
        self._calling, self._listening, self.batch = calling, listening, batch

    def put(self) -> None:
        self._move(READ, 0)

    def get(self) -> None:
        self._move(WRITE, self.batch.values.nbytes)

    def empty(self) -> None:
        """Nothing has to be removed."""

    def _move(self, operation: Operation, begin: int) -> None:
        num_bytes = self.batch.values.nbytes
        ranges = [Range(at, begin + at, min(_PART_BYTES, num_bytes - at)) for at in range(0, num_bytes, _PART_BYTES)]
        listening = self._listening
        ticket = self._calling.start(operation, listening.segments, listening.address, ranges)
        self._calling.wait(ticket, _TIMEOUT_S)


@contextlib.contextmanager
def engine_peer(batch: BlockBatch) -> Iterator[EnginePeer]:
    """Start the engines, and move the arrays of the batch to memory that one of them maps. Raises
    TransferFailedError."""
    num_bytes = batch.values.nbytes
    with contextlib.ExitStack() as cleanup:

        def process(memory_bytes: int, endpoint: Endpoint, *, shared: bool) -> tuple[TransferProcess, mmap.mmap]:
            memory = os.memfd_create("kvservice-bench", os.MFD_CLOEXEC)
            cleanup.callback(os.close, memory)
            os.ftruncate(memory, memory_bytes)
            started = TransferProcess(memory, memory_bytes, endpoint, shared=shared)
            cleanup.callback(started.kill)
            return started, mmap.mmap(memory, memory_bytes)

        listening, mapped = process(2 * num_bytes, Endpoint(_LOOPBACK, peer=_LOOPBACK), shared=True)
        calling, _ = process(num_bytes, Endpoint(_LOOPBACK, peer=_LOOPBACK, calls=True), shared=False)
        values, out = np.frombuffer(mapped, np.uint8).reshape(2, *batch.values.shape)
        values[...] = batch.values
        batch.values, batch.out = values, out
        yield EnginePeer(calling, listening, batch)
