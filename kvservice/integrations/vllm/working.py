"""The workers' side of the connector: it loads and saves blocks on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvservice.client import PutStatus
from kvservice.integrations.vllm.statistics import TransferCounters
from kvservice.integrations.vllm.steps import BlockLoad, BlockSave, ConnectorStep
from kvservice.integrations.vllm.transfers import BlockCopier, Flags, Statuses, done

logger = logging.getLogger(__name__)

# How long a step waits for saves of blocks that it overwrites, in seconds. Then the saves are given up.
PATIENCE_S = 0.25
_LOAD, _SAVE, _STOP = range(3)


@dataclass(eq=False)
class _PendingLoad:
    """A load of which `num_parts` have not ended. `failed` are the blocks that are not right."""

    load: BlockLoad
    mark: Any
    num_parts: int = 0
    began: float = 0.0
    failed: set[int] = field(default_factory=set)


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

    A thread starts the copies. They end on that thread or on another one of the copier.

    A load that fails in part or as a whole names its blocks in `take_failed_blocks` when the request is finished, and
    vLLM computes them again. A save that fails is a miss later.
    """

    def __init__(self, store: Any, copier: BlockCopier, block_bytes: int) -> None:
        """`store`: a store of the client for this worker's namespace, used by the thread alone until `close`."""
        self._store, self._copier = store, copier
        self._block_bytes = block_bytes
        self._at_once = max(1, copier.call_bytes // block_bytes)
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
        if not step.loads:
            return
        mark = self._copier.mark()
        for load in step.loads:
            self._put(_LOAD, _PendingLoad(load, mark))

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
                self._copier.close()
                return
            if isinstance(work, _PendingLoad):
                self._load(work)
            else:
                self._save(work)

    def _load(self, pending: _PendingLoad) -> None:
        load, pending.began = pending.load, time.monotonic()
        parts = [slice(first, first + self._at_once) for first in range(0, len(load.keys), self._at_once)]
        pending.num_parts = len(parts)
        for part in parts:
            started = _started(self._copier.get, self._store, load.keys[part], load.block_ids[part], pending.mark)
            started.add_done_callback(partial(self._part_loaded, pending, load.block_ids[part]))

    def _part_loaded(self, pending: _PendingLoad, block_ids: tuple[int, ...], part: Future[Flags]) -> None:
        try:
            wrong = {block_ids[i] for i in np.flatnonzero(~part.result())}
        except Exception:
            # Whatever the error is, the request must go on.
            logger.exception("blocks could not be loaded, vLLM computes them")
            wrong = set(block_ids)
        with self._lock:
            pending.failed |= wrong
            pending.num_parts -= 1
            if not pending.num_parts:
                self._loaded(pending)

    def _loaded(self, pending: _PendingLoad) -> None:
        num_loaded = len(pending.load.keys) - len(pending.failed)
        self._failed |= pending.failed
        self._finished.add(pending.load.request_id)
        counters = self._counters
        counters.blocks_loaded += num_loaded
        counters.blocks_not_loaded += len(pending.failed)
        counters.bytes_loaded += num_loaded * self._block_bytes
        counters.load_seconds += time.monotonic() - pending.began

    def _save(self, pending: _PendingSave) -> None:
        began = time.monotonic()
        _started(self._start_save, pending).add_done_callback(partial(self._saved, pending, began))

    def _start_save(self, pending: _PendingSave) -> Future[Statuses]:
        """Store the blocks that the store does not have."""
        save = pending.save
        missing = np.flatnonzero(~self._store.lookup(save.keys, counted=False).found).tolist()
        if not missing:
            return done(np.zeros(0, np.uint8))
        keys, block_ids = [save.keys[i] for i in missing], [save.block_ids[i] for i in missing]
        pending.reading.acquire()
        if pending.abandoned:
            started = done(np.full(len(keys), PutStatus.UNREACHABLE, np.uint8))
        else:
            started = _started(self._copier.put, self._store, keys, block_ids, pending.mark)
        started.add_done_callback(lambda _: pending.reading.release())
        return started

    def _saved(self, pending: _PendingSave, began: float, result: Future[Statuses]) -> None:
        try:
            statuses = result.result()
            num_saved = int((statuses == PutStatus.DONE).sum())
            num_lost = int(np.isin(statuses, (PutStatus.NO_ROOM, PutStatus.UNREACHABLE)).sum())
        except Exception:
            logger.exception("blocks could not be saved")
            num_saved, num_lost = 0, len(pending.save.keys)
        with self._lock:
            counters = self._counters
            counters.blocks_saved += num_saved
            counters.blocks_not_saved += num_lost
            counters.bytes_saved += num_saved * self._block_bytes
            counters.save_seconds += time.monotonic() - began
        pending.ended.set()


def _started(start: Callable[..., Future[Any]], *arguments: Any) -> Future[Any]:
    """Return what `start` returns, or a future with its error."""
    try:
        return start(*arguments)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
