"""The workers' side of the connector: it loads and saves blocks.

    a load of a step:   launched before the step computes, which waits for it on its device; checked at the step's end,
                        or, if vLLM cannot compute blocks again then, by the scheduler before it takes the step's tokens
    asynchronous loads: a thread starts them; their requests continue when they have ended
    saves:              one job of another thread, after the computations of their step; the end of each is reported,
                        however it ends. Those that come soon after a job has begun are the next one together

No step waits for a save, but one whose blocks vLLM has taken back: see `ConnectorStep.abandoned`.
"""

from __future__ import annotations

import itertools
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
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.values import some_keys
from kvservice.integrations.vllm.copies import BlockCopier, Flags, Statuses, StepRead
from kvservice.integrations.vllm.steps import (
    BlockIds,
    BlockLoad,
    BlockSave,
    ConnectorStep,
    MemoryId,
    Rank,
    StepLoad,
    TransferCounters,
    WorkerReport,
    wrong_load,
)

logger = logging.getLogger(__name__)

# How long a step waits for asynchronous loads while nothing is computed: a request that comes then waits as long. vLLM
# itself pauses for twice that between such steps.
IDLE_S = 0.0005
# How often the mapping of the store is looked at while nothing is loaded.
LOOK_S = 0.1
# The least time between the beginnings of two jobs that save. A job costs the computing process a good part of a
# millisecond of its interpreter, of few blocks as of many, and many steps have a few blocks to save.
SAVE_INTERVAL_S = 0.03
# A mapping that is lost is kept for the loads of steps that vLLM has scheduled: so many steps more, or for some seconds
# without any.
KEEP_STEPS, KEEP_S = 4, 10.0


@dataclass(eq=False)
class _Load:
    """An asynchronous load of which `num_parts` have not ended. `failed` are the blocks that are not right."""

    load: BlockLoad
    mark: Any
    num_parts: int = 0
    began: float = 0.0
    failed: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Save:
    """The saves of one or more steps. `mark` is after the computations of the last. `num_parts` calls have not ended.
    If one of the saves is given up, all are."""

    saves: list[BlockSave] = field(default_factory=list)
    mark: Any = None
    began: float = 0.0
    num_parts: int = 0
    given_up: bool = False
    ended: bool = False


@dataclass(frozen=True)
class EndedLoads:
    """The loads that a step has ended: the requests that have all their asynchronous loads, those of them with a
    `wrong` block, and all blocks that are not right."""

    loaded: set[str]
    failed: set[str]
    wrong: set[int]


class ConnectorWorker:
    """Methods are for one thread, vLLM's. A load that fails in part or as a whole names its blocks, and vLLM computes
    them again. A save that fails is a miss later."""

    def __init__(
        self,
        store: Any,
        copier: BlockCopier,
        block_bytes: int,
        *,
        rank: Rank = (0, 0),
        blocks_of: Rank | None = None,
        recomputes: bool = True,
    ) -> None:
        """`store`: a store of the client for this worker's namespace. `blocks_of`: the rank whose worker saves these
        blocks, if that is another one with the same blocks. `recomputes`: vLLM computes blocks again that a step has
        loaded wrongly; otherwise that is an error, so that nothing wrong becomes a token."""
        self._store, self._copier, self._recomputes = store, copier, recomputes
        self.rank, self._blocks_of = rank, blocks_of or rank
        self._block_bytes = block_bytes
        self._at_once = max(1, copier.call_bytes // block_bytes)
        lock = threading.RLock()
        self._lock, self._may_save = threading.Condition(lock), threading.Condition(lock)
        # Mappings of the store by their identity, and when they were last used: the time, and the number of the step.
        self._memories: dict[MemoryId, tuple[MappedStore, float, int]] = {}
        self._num_steps = 0
        self._memory: MappedStore | None = None
        self._reported: tuple[MemoryId | None, ...] = ()
        self._mark: Any = None
        self._in_step: list[tuple[StepLoad, float, StepRead | None]] = []
        self._num_loading = 0
        self._saving: dict[int, _Save] = {}
        # The job that has not begun, and whether it begins at once.
        self._next_save: _Save | None = None
        self._hurries = self._closing = False
        self._finished: set[str] = set()
        self._failed_requests: set[str] = set()
        self._failed: set[int] = set()
        self._counters, self._report = TransferCounters(), WorkerReport()
        self._look()
        self._loads: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"kvservice-{name}", daemon=True)
            for name, run in (("loads", self._run_loads), ("saves", self._run_saves))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def memory(self) -> MemoryId | None:
        """The identity of the store's memory, None if it is not mapped."""
        return None if self._memory is None else self._memory.identity

    def before_step(self, step: ConnectorStep) -> None:
        """Prepare for a step that may overwrite the blocks of abandoned saves."""
        with self._lock:
            given_up = {self._saving[number] for number in step.abandoned if number in self._saving}
            for job in given_up:
                job.given_up = True
            self._hurry(given_up)
            if given_up:
                self._lock.wait_for(lambda: all(job.ended for job in given_up))  # copies in progress
        self._num_steps += 1
        self._look()
        self._mark = self._copier.mark() if step.loads else None

    def start_loads(self, step: ConnectorStep) -> None:
        """Launch the loads of the step, and let a thread start the others."""
        if (load := step.step_load) is not None:
            began, reading, leased = time.monotonic(), None, load.leased[self._blocks_of]
            try:
                if (kept := self._memories.get(leased.memory)) is not None:
                    reading = self._copier.read(kept[0], leased, load.block_ids)
            except Exception:
                logger.exception("blocks could not be loaded")
            self._in_step.append((load, began, reading))
        for async_load in step.loads:
            self._num_loading += 1
            self._loads.put(_Load(async_load, self._mark))

    def start_saves(self, step: ConnectorStep) -> None:
        """Save blocks whose computation is queued or done."""
        if step.num_skipped:
            with self._lock:
                self._counters.blocks_skipped += step.num_skipped
        if not step.saves:
            return
        if self.rank != self._blocks_of:
            with self._lock:
                self._report.saves.update(save.number for save in step.saves)
            return
        mark = self._copier.mark()
        with self._lock:
            job = self._next_save
            if job is None:
                job = self._next_save = _Save(began=time.monotonic())
                self._may_save.notify()
            job.mark = mark
            for save in step.saves:
                job.saves.append(save)
                self._saving[save.number] = job

    def end_step(self, *, computes: bool) -> EndedLoads:
        """Wait for the loads of the step, if vLLM can mend them. Returns what has ended since the last call. Raises
        InternalError if a block that is not right would become a token."""
        for load, began, reading in self._in_step:
            self._end_step_load(load, began, reading)
        self._in_step = []
        with self._lock:
            if not computes:
                self._hurry(self._next_save)
                if self._num_loading:
                    self._lock.wait_for(lambda: self._finished, IDLE_S)
            self._num_loading -= len(self._finished)
            ended = EndedLoads(self._finished, self._failed_requests, self._failed)
            self._finished, self._failed_requests, self._failed = set(), set(), set()
        return ended

    def take_report(self) -> WorkerReport | None:
        """Return what the scheduler's side has not been told yet."""
        with self._lock:
            if self._reported != (self.memory,):
                self._reported = (self.memory,)
                self._report.memories[self.rank] = self.memory
            if self._report.empty:
                return None
            report, self._report = self._report, WorkerReport()
        return report

    def take_counters(self) -> TransferCounters:
        """Return what has been counted since the last call."""
        with self._lock:
            counters, self._counters = self._counters, TransferCounters()
        return counters

    def wait_for_saves(self, timeout_s: float) -> bool:
        """Wait for all saves. Returns whether they have ended."""
        with self._lock:
            self._hurry(self._next_save)
            return self._lock.wait_for(lambda: not self._saving, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Save what is pending, at most for `timeout_s` seconds, and close the store."""
        self._loads.put(None)
        with self._lock:
            self._closing = True
            self._may_save.notify()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("the connector ends while blocks are being saved; they are lost to other engines")
            return
        self._copier.close()
        self._memories.clear()
        self._store.close()

    def _look(self) -> None:
        """Notice that the store is mapped, not any more, or anew."""
        now, memory = time.monotonic(), self._store.memory
        with self._lock:
            self._memory = memory
            if memory is not None:
                self._memories[memory.identity] = (memory, now, self._num_steps)
            for identity, (_, used_s, step) in list(self._memories.items()):
                if now - used_s > KEEP_S or self._num_steps - step > KEEP_STEPS:
                    del self._memories[identity]
        self._copier.use(memory)

    # ---- loads

    def _end_step_load(self, load: StepLoad, began: float, reading: StepRead | None) -> None:
        block_ids, wrong = load.block_ids, None
        try:
            if reading is not None:
                right = reading.wait() if self._recomputes else reading.right
                wrong = set() if right is None or right.all() else set(block_ids[~right].tolist())
        except Exception:
            logger.exception("blocks could not be loaded")
        if wrong is None:
            wrong = set(block_ids.tolist())
        with self._lock:
            self._count_load(len(block_ids), len(wrong), began)
            self._counters.blocks_loaded_in_step += len(block_ids) - len(wrong)
            self._failed |= wrong
            self._report.loads[load.number] += 1
        if wrong and not self._recomputes:
            raise wrong_load()

    def _run_loads(self) -> None:
        while True:
            try:
                work = self._loads.get(timeout=LOOK_S)
            except queue.Empty:
                self._look()
                continue
            if work is None:
                return
            self._load(work)

    def _load(self, work: _Load) -> None:
        load, work.began = work.load, time.monotonic()
        leased = None if load.leased is None or self._copier.verifies else load.leased[self._blocks_of]
        with self._lock:
            kept = None if leased is None else self._memories.get(leased.memory)
        block_ids = np.array(load.block_ids, np.int64)
        parts = self._parts(len(block_ids))
        work.num_parts = len(parts)
        for part in parts:
            if leased is None or kept is None:
                some = some_keys(load.keys, part)
                started = _started(self._copier.get, self._store, some, block_ids[part], work.mark)
            else:
                started = _started(self._copier.fetch, kept[0], leased[part], block_ids[part], work.mark)
            started.add_done_callback(partial(self._part_loaded, work, block_ids[part]))

    def _part_loaded(self, work: _Load, block_ids: BlockIds, part: Future[Flags]) -> None:
        try:
            wrong = set(block_ids[~part.result()].tolist())
        except Exception:
            # Whatever the error is, the request must go on.
            logger.exception("blocks could not be loaded, vLLM computes them")
            wrong = set(block_ids.tolist())
        with self._lock:
            work.failed |= wrong
            work.num_parts -= 1
            if not work.num_parts:
                self._failed |= work.failed
                if work.failed:
                    self._failed_requests.add(work.load.request_id)
                self._finished.add(work.load.request_id)
                self._count_load(len(work.load.block_ids), len(work.failed), work.began)
                self._lock.notify_all()

    def _count_load(self, num_blocks: int, num_failed: int, began: float) -> None:
        counters, num_loaded = self._counters, num_blocks - num_failed
        counters.blocks_loaded += num_loaded
        counters.blocks_not_loaded += num_failed
        counters.bytes_loaded += num_loaded * self._block_bytes
        counters.load_seconds += time.monotonic() - began

    # ---- saves

    def _hurry(self, waits_for: object) -> None:
        """Begin the next job at once if somebody waits for it. The lock is held."""
        if waits_for:
            self._hurries = True
            self._may_save.notify()

    def _run_saves(self) -> None:
        began = -SAVE_INTERVAL_S
        while (job := self._take_save(began + SAVE_INTERVAL_S)) is not None:
            began = time.monotonic()
            keys = b"".join([save.keys for save in job.saves])
            block_ids = np.fromiter(itertools.chain.from_iterable([save.block_ids for save in job.saves]), np.int64)
            parts = self._parts(len(block_ids))
            job.num_parts = len(parts)
            for part in parts:
                if job.given_up or not self._store.reachable:
                    started: Future[Statuses] = Future()
                    started.set_result(np.full(len(block_ids[part]), PutStatus.UNREACHABLE, np.uint8))
                else:
                    some = some_keys(keys, part)
                    started = _started(self._copier.put, self._store, some, block_ids[part], job.mark)
                started.add_done_callback(partial(self._part_saved, job, len(block_ids[part])))

    def _take_save(self, not_before_s: float) -> _Save | None:
        """Wait for the next job, and until it may begin. Returns None at the end."""
        with self._lock:
            self._may_save.wait_for(lambda: self._next_save is not None or self._closing)
            wait_s = not_before_s - time.monotonic()
            if wait_s > 0:
                self._may_save.wait_for(lambda: self._hurries or self._closing, wait_s)
            job, self._next_save, self._hurries = self._next_save, None, False
            return job

    def _part_saved(self, job: _Save, num_blocks: int, part: Future[Statuses]) -> None:
        try:
            statuses = part.result()
            num_saved = int((statuses == PutStatus.DONE).sum())
            num_lost = int(np.isin(statuses, (PutStatus.NO_ROOM, PutStatus.UNREACHABLE)).sum())
        except Exception:
            logger.exception("blocks could not be saved")
            num_saved, num_lost = 0, num_blocks
        with self._lock:
            counters = self._counters
            counters.blocks_saved += num_saved
            counters.blocks_not_saved += num_lost
            counters.bytes_saved += num_saved * self._block_bytes
            job.num_parts -= 1
            if job.num_parts:
                return
            counters.save_seconds += time.monotonic() - job.began
            for save in job.saves:
                del self._saving[save.number]
                self._report.saves[save.number] += 1
            job.ended = True
            self._lock.notify_all()

    def _parts(self, num_blocks: int) -> list[slice]:
        return [slice(first, first + self._at_once) for first in range(0, num_blocks, self._at_once)]


def _started(start: Callable[..., Future[Any]], *arguments: Any) -> Future[Any]:
    """Return what `start` returns, or a future with its error."""
    try:
        return start(*arguments)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
