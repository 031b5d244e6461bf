"""Block copies that overlap with compute. Each kind of copy has its own stream; only events order the streams.

A copy waits for all earlier work on the compute stream, and for in-flight copies that read or write any of its blocks.
Compute waits for in-flight copies that write the blocks that it reads, and for those that read or write the blocks that
it writes. Since each copy waits for all earlier copies of the same block, the number of the last copy per block is
sufficient. Without in-flight copies nothing is checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvservice.devices.base import Array, Int32, UnfinishedBlocks

if TYPE_CHECKING:
    from kvservice import _cuda


# ---- threads that wait for events of a GPU, so that the end of a copy is noticed soon even when nothing follows it


# An event and what follows it. None ends the thread.
_Completion: TypeAlias = "tuple[_cuda.Event, Callable[[], object]] | None"


class Completions:
    """Runs calls after the work on a stream. Each stream has a thread, which sleeps in the driver."""

    def __init__(self, cuda: ModuleType, device: int, fail: Callable[[BaseException], object]) -> None:
        """`fail` is called with an error of the device or of a call. The stream's later calls do not run then."""
        self._cuda = cuda
        self._device = device
        self._fail = fail
        self._spare: list[_cuda.Event] = []
        self._threads: dict[int, tuple[threading.Thread, SimpleQueue[_Completion]]] = {}

    def after(self, stream: _cuda.Stream, call: Callable[[], object]) -> None:
        """Run `call` in the stream's thread when all work launched on the stream is complete."""
        event = self._spare.pop() if self._spare else self._cuda.Event(self._device, blocking=True)
        event.record(stream.handle)
        if stream.handle not in self._threads:
            self._threads[stream.handle] = self._start()
        self._threads[stream.handle][1].put((event, call))

    def close(self) -> None:
        """End the threads after their calls. All streams must be idle."""
        for _, queue in self._threads.values():
            queue.put(None)
        for thread, _ in self._threads.values():
            thread.join()

    def _start(self) -> tuple[threading.Thread, SimpleQueue[_Completion]]:
        queue: SimpleQueue[_Completion] = SimpleQueue()
        # A daemon thread: the process of a faulted device exits although events are never reached.
        thread = threading.Thread(target=self._run, args=(queue,), name="copies", daemon=True)
        thread.start()
        return thread, queue

    def _run(self, queue: SimpleQueue[_Completion]) -> None:
        try:
            self._cuda.set_device(self._device)
            while (completion := queue.get()) is not None:
                event, call = completion
                event.synchronize()
                call()
                self._spare.append(event)
        except BaseException as error:
            self._fail(error)


# ---- the copies


# An in-flight copy: its end event, its stream, and its start event if its duration is counted.
InFlightCopy: TypeAlias = "tuple[_cuda.Event, _cuda.Stream, _cuda.Event | None]"


class Tier:
    """The blocks of a tier at an address. For each block it has the numbers of the last copy that read or wrote it, and
    of the last copy that wrote it."""

    def __init__(
        self, pointer: int, num_blocks: int, unfinished: UnfinishedBlocks, *, in_host_memory: bool = False
    ) -> None:
        self.pointer = pointer
        self.num_blocks = num_blocks
        self.unfinished = unfinished
        self.in_host_memory = in_host_memory
        self.last_touch = np.zeros(num_blocks, np.int64)
        self.last_write = np.zeros(num_blocks, np.int64)


class Copies:
    """Copies between pool and swap tier, and within the pool. It is used by one thread at a time.

    The caller counts the destination of a copy as unfinished when it submits the copy, and the completion of the copy
    ends that.
    """

    def __init__(
        self,
        cuda: ModuleType,
        device: int,
        compute: _cuda.Stream,
        pool: Tier,
        swap: Tier,
        block_bytes: int,
        fail: Callable[[BaseException], object],
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._compute = compute
        self.pool = pool
        self.swap = swap
        self._block_bytes = block_bytes
        self._within, self._out, self._in = (cuda.Stream(device) for _ in range(3))
        self._computed = cuda.Event(device)
        self._completions = Completions(cuda, device, fail)
        # Seconds between start and end event, summed over the copies that are known to be complete.
        self.swap_busy_s = {"out": 0.0, "in": 0.0}
        self._spare: list[_cuda.Event] = []
        # In-flight copies by number, oldest first.
        self._copies: dict[int, InFlightCopy] = {}
        self._newest = 0

    def within_pool(self, src_ids: Int32, dst_ids: Int32) -> None:
        self._copy(self._within, self.pool, self.pool, src_ids, dst_ids)

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        self._copy(self._out, self.pool, self.swap, src_ids, dst_ids)

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        self._copy(self._in, self.swap, self.pool, src_ids, dst_ids)

    def _copy(self, stream: _cuda.Stream, source: Tier, target: Tier, src_ids: Int32, dst_ids: Int32) -> None:
        self._wait_for_compute(stream)
        self._wait(stream, self._in_flight(source.last_touch[src_ids]))
        self._wait(stream, self._in_flight(target.last_touch[dst_ids]))
        begin = None if stream is self._within else self._event()
        if begin is not None:
            begin.record(stream.handle)
        self._cuda.copy_blocks(
            source.pointer,
            target.pointer,
            source.num_blocks,
            target.num_blocks,
            self._block_bytes,
            src_ids,
            dst_ids,
            stream.handle,
        )
        event = self._event()
        event.record(stream.handle)
        self._newest += 1
        self._copies[self._newest] = (event, stream, begin)
        source.last_touch[src_ids] = self._newest
        target.last_touch[dst_ids] = target.last_write[dst_ids] = self._newest
        self._completions.after(stream, partial(target.unfinished.end, dst_ids))

    def let_wait(self, stream: _cuda.Stream, tier: Tier, blocks: Int32, *, writes: bool) -> None:
        """Let a stream that reads or writes blocks of a tier wait for all work on the compute stream and for in-flight
        copies."""
        self._wait_for_compute(stream)
        self._wait(stream, self._in_flight((tier.last_touch if writes else tier.last_write)[blocks]))

    def _event(self) -> _cuda.Event:
        return self._spare.pop() if self._spare else self._cuda.Event(self._device, True)

    def _wait_for_compute(self, stream: _cuda.Stream) -> None:
        self._computed.record(self._compute.handle)
        stream.wait(self._computed)

    def to_wait_for(self, reads: Array, writes: Array) -> list[InFlightCopy]:
        """Return the in-flight copies for which a call that reads and writes these blocks of the pool must wait."""
        if not self._copies:
            return []
        return self._in_flight(self.pool.last_write[reads]) + self._in_flight(self.pool.last_touch[writes])

    def let_compute_wait(self, reads: Array, writes: Array) -> None:
        self._wait(self._compute, self.to_wait_for(reads, writes))

    def _wait(self, stream: _cuda.Stream, copies: list[InFlightCopy]) -> None:
        for event, other, _ in copies:
            if other is not stream:
                stream.wait(event)

    def _in_flight(self, numbers: Array) -> list[InFlightCopy]:
        """Return the copies with these numbers that are not complete."""
        self._drop_completed()
        if not self._copies:
            return []
        numbers = numbers[numbers >= next(iter(self._copies))]
        return [self._copies[number] for number in np.unique(numbers).tolist() if number in self._copies]

    def _drop_completed(self) -> None:
        busy: set[int] = set()
        for number, (event, stream, begin) in list(self._copies.items()):
            if stream.handle in busy:
                continue
            if event.done():
                del self._copies[number]
                if begin is not None:
                    self.swap_busy_s["out" if stream is self._out else "in"] += event.elapsed_ms(begin) / 1e3
                    self._spare.append(begin)
                self._spare.append(event)
            else:
                busy.add(stream.handle)

    def close(self) -> None:
        """Wait for all copies."""
        for stream in (self._within, self._out, self._in):
            stream.synchronize()
        self._completions.close()
