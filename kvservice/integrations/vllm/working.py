"""The workers' side of the connector: it loads and saves blocks on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvservice.client import PutStatus
from kvservice.integrations.vllm.statistics import TransferCounters
from kvservice.integrations.vllm.steps import BlockLoad, BlockSave, ConnectorStep
from kvservice.integrations.vllm.transfers import BlockCopier

logger = logging.getLogger(__name__)

# The most bytes of blocks in one call.
CALL_BYTES = 16 << 20
# How long a step waits for saves of blocks that it overwrites, in seconds. Then the saves are given up.
PATIENCE_S = 0.25
_LOAD, _SAVE, _STOP = range(3)


@dataclass(eq=False)
class _PendingSave:
    """A save that has not ended. `reading` is held while its blocks are read."""

    save: BlockSave
    mark: Any
    reading: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False


class ConnectorWorker:
    """Loads come before saves. No method but `before_step` and `close` waits.

    A load that fails in part or as a whole names its blocks in `take_failed_blocks` when the request is finished, and
    vLLM computes them again. A save that fails is a miss later.
    """

    def __init__(self, store: Any, copier: BlockCopier, block_bytes: int) -> None:
        """`store`: a store of the client for this worker's namespace, used by the thread alone until `close`."""
        self._store, self._copier = store, copier
        self._block_bytes = block_bytes
        self._at_once = blocks_per_call(block_bytes)
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._number = 0
        self._pending: list[_PendingSave] = []
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._counters = TransferCounters()
        self._thread = threading.Thread(target=self._run, name="kvservice-connector", daemon=True)
        self._thread.start()

    def before_step(self, step: ConnectorStep) -> None:
        """Wait until no save reads blocks that the step overwrites. Saves that take too long are given up, so that
        nothing wrong is stored; only a call in progress is always awaited."""
        self._pending = [pending for pending in self._pending if not pending.ended.is_set()]
        deadline = time.monotonic() + PATIENCE_S
        for pending in self._pending:
            if not pending.abandoned and not step.overwritten.isdisjoint(pending.save.block_ids):
                pending.ended.wait(max(deadline - time.monotonic(), 0))
                with pending.reading:
                    pending.abandoned = True

    def start_loads(self, step: ConnectorStep) -> None:
        for load in step.loads:
            self._put(_LOAD, load)

    def start_saves(self, step: ConnectorStep) -> None:
        """Save blocks whose computation is queued or done."""
        if not step.saves:
            return
        mark = self._copier.mark()
        for save in step.saves:
            for first in range(0, len(save.keys), self._at_once):
                part = slice(first, first + self._at_once)
                pending = _PendingSave(BlockSave(save.keys[part], save.block_ids[part]), mark)
                self._pending.append(pending)
                self._put(_SAVE, pending)

    def take_finished_loads(self) -> tuple[set[str], set[int]]:
        """Return the requests whose loads have ended since the last call, and their blocks that are not right."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def take_counters(self) -> TransferCounters:
        """Return what has been counted since the last call."""
        with self._lock:
            counters, self._counters = self._counters, TransferCounters()
        return counters

    def close(self, timeout_s: float) -> None:
        """Save what is pending, at most for `timeout_s` seconds, and close the store."""
        self._put(_STOP, None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the connector ends while blocks are being saved; they are lost to other engines")
            return
        self._store.close()

    def _put(self, order: int, work: Any) -> None:
        self._number += 1
        self._queue.put((order, self._number, work))

    def _run(self) -> None:
        while True:
            _, _, work = self._queue.get()
            if work is None:
                return
            if isinstance(work, BlockLoad):
                self._load(work)
            else:
                self._save(work)

    def _load(self, load: BlockLoad) -> None:
        began = time.monotonic()
        failed: set[int] = set()
        for first in range(0, len(load.keys), self._at_once):
            part = slice(first, first + self._at_once)
            failed |= self._load_part(load.keys[part], load.block_ids[part])
        with self._lock:
            self._failed |= failed
            self._finished.add(load.request_id)
            counters = self._counters
            counters.blocks_loaded += len(load.keys) - len(failed)
            counters.blocks_not_loaded += len(failed)
            counters.bytes_loaded += (len(load.keys) - len(failed)) * self._block_bytes
            counters.load_seconds += time.monotonic() - began

    def _load_part(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> set[int]:
        """Return the blocks that are not right."""
        try:
            found = self._copier.get(self._store, keys, block_ids)
        except Exception:
            # Whatever the error is, the request must go on.
            logger.exception("blocks could not be loaded, vLLM computes them")
            return set(block_ids)
        return {block_id for block_id, right in zip(block_ids, found, strict=True) if not right}

    def _save(self, pending: _PendingSave) -> None:
        began = time.monotonic()
        num_saved = num_lost = 0
        try:
            num_saved, num_lost = self._save_missing(pending)
        except Exception:
            logger.exception("blocks could not be saved")
            num_lost = len(pending.save.keys)
        finally:
            pending.ended.set()
        with self._lock:
            counters = self._counters
            counters.blocks_saved += num_saved
            counters.blocks_not_saved += num_lost
            counters.bytes_saved += num_saved * self._block_bytes
            counters.save_seconds += time.monotonic() - began

    def _save_missing(self, pending: _PendingSave) -> tuple[int, int]:
        """Store the blocks that the store does not have. Returns how many it did store, and how many it could not."""
        save = pending.save
        missing = np.flatnonzero(~self._store.lookup(save.keys).found)
        if not len(missing):
            return 0, 0
        keys, block_ids = [save.keys[i] for i in missing], [save.block_ids[i] for i in missing]
        with pending.reading:
            if pending.abandoned:
                return 0, len(keys)
            # The last block first: then the first, without which the others are useless, is the last to be evicted.
            statuses = self._copier.put(self._store, keys[::-1], block_ids[::-1], pending.mark)
        num_saved = int((statuses == PutStatus.DONE).sum())
        num_lost = int(np.isin(statuses, (PutStatus.NO_ROOM, PutStatus.UNREACHABLE)).sum())
        return num_saved, num_lost


def blocks_per_call(block_bytes: int) -> int:
    """Return the most blocks that are copied by one call."""
    return max(1, CALL_BYTES // block_bytes)
