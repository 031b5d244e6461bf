"""Copies between blocks on a GPU and the mapped memory of the store.

    start: lease or reserve, page-lock, launch the copy ─▶ end, on another thread: wait for the copy, check or commit

Leases and reservations are held until the copy has ended. Several copies are in flight, so that the link to the GPU is
busy while the daemon is asked for the next blocks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import numpy as np

from kvservice.client import PutStatus
from kvservice.integrations.vllm.gpu_blocks import BlockIds, Numbers
from kvservice.integrations.vllm.page_locks import LockablePages, PageLocks
from kvservice.integrations.vllm.transfers import BlockCopier, Flags, Statuses

logger = logging.getLogger(__name__)

# About the most bytes of one call. The daemon is asked meanwhile for the blocks of the next.
CALL_BYTES = 128 << 20
# Most copies that have started and not ended.
IN_FLIGHT = 4


class Passing(Protocol):
    def synchronize(self) -> None:
        """Wait for the end of a copy."""


P = TypeVar("P", bound=Passing)


class PassingSave(Passing, Protocol):
    def checksums(self) -> Numbers:
        """Return the checksum of each block, after the end of the copy."""


class CopyingGpu(LockablePages, Protocol):
    """See GpuBlocks."""

    def mark(self) -> Any: ...

    def load(self, addresses: Numbers, block_ids: BlockIds, mark: Any) -> Passing: ...

    def save(self, addresses: Numbers, block_ids: BlockIds, mark: Any) -> PassingSave: ...


class MappedCopier:
    """A BlockCopier without a copy in between. It uses `staged` if the store is not mapped or its memory cannot be
    page-locked, for saves if the store is mapped for reading only, and for loads that compare checksums."""

    call_bytes = CALL_BYTES

    def __init__(self, gpu: CopyingGpu, staged: BlockCopier, *, verify: bool) -> None:
        self._gpu, self._staged, self._verify = gpu, staged, verify
        self._locks = PageLocks(gpu)
        self._room = threading.BoundedSemaphore(IN_FLIGHT)
        self._ending = ThreadPoolExecutor(1, thread_name_prefix="kvservice-copies")

    def mark(self) -> Any:
        return self._gpu.mark()

    def get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> Future[Flags]:
        if self._locks.use(store.memory) and not self._verify:
            lease = store.acquire(b"".join(keys))
            started = self._start(lease, lease.found, block_ids, mark, self._gpu.load, self._end_load)
            if started is not None:
                return started
        return self._staged.get(store, keys, block_ids, mark)

    def put(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> Future[Statuses]:
        memory = store.memory
        if self._locks.use(memory) and memory.writable:
            reservation = store.reserve(b"".join(keys))
            started = self._start(reservation, reservation.reserved, block_ids, mark, self._gpu.save, self._end_save)
            if started is not None:
                return started
        return self._staged.put(store, keys, block_ids, mark)

    def close(self) -> None:
        self._ending.shutdown()
        self._locks.close()
        self._staged.close()

    def _start(
        self,
        holding: Any,
        held: Flags,
        block_ids: Sequence[int],
        mark: Any,
        copy: Callable[[Numbers, BlockIds, Any], P],
        end: Callable[[Any, P], Any],
    ) -> Future[Any] | None:
        """Launch the copy of the blocks that are held. Returns None if their memory cannot be page-locked."""
        with ExitStack() as undo:
            undo.enter_context(holding)
            addresses = holding.addresses[held]
            if len(addresses) and not self._locks.cover(holding.memory, addresses):
                return None
            self._room.acquire()
            undo.callback(self._room.release)
            undo.callback(self._gpu.settle)  # a part of the copy may have been launched
            passing = copy(addresses, np.array(block_ids, np.int64)[held], mark)
            result: Future[Any] = Future()
            self._ending.submit(self._end, result, holding, passing, end)
            undo.pop_all()
            return result

    def _end(self, result: Future[Any], holding: Any, passing: P, end: Callable[[Any, P], Any]) -> None:
        """Wait for a copy. The result does not wait for the end of the lease."""
        try:
            with holding:
                result.set_result(end(holding, passing))
        except Exception as error:
            if result.done():
                logger.exception("a lease could not be ended")
            else:
                result.set_exception(error)
        finally:
            self._room.release()

    @staticmethod
    def _end_load(lease: Any, passing: Passing) -> Flags:
        """Return which blocks are right: those whose lease did not end during the copy."""
        passing.synchronize()
        right: Flags = lease.check()
        return right

    @staticmethod
    def _end_save(reservation: Any, passing: PassingSave) -> Statuses:
        passing.synchronize()
        statuses: Statuses = reservation.statuses.copy()
        checksums = np.zeros(len(statuses), np.uint64)
        checksums[reservation.reserved] = passing.checksums()
        if reservation.commit(checksums=checksums) != np.count_nonzero(reservation.reserved):
            statuses[reservation.reserved] = PutStatus.UNREACHABLE
        return statuses
