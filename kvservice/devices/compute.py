"""The compute stream. Calls are launched on it in submission order.

A call uploads tensors, launches kernels, downloads results and records an event. A short call with no long call before
it is launched and awaited on the event loop, which costs less than a hop to a thread and back. Any other call is
launched by one thread and awaited by another, so that later calls can be launched behind it in the meantime.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvservice.blocks import StepPlan
from kvservice.devices.arena import Arena, DeviceStepTables, LiveTables, StagingBuffer
from kvservice.devices.base import Array
from kvservice.devices.copies import Copies, Tier
from kvservice.devices.cpu import ByteQueue, awaited, ready
from kvservice.errors import InternalError, ResourceExhaustedError
from kvservice.pool.pools import OUT_OF_MEMORY

if TYPE_CHECKING:
    from kvservice import _cuda

T = TypeVar("T")

# Longest estimated time in seconds for which a call may block the event loop.
INLINE_S = 100e-6
# Most block copies that are launched on the event loop. Each launch takes microseconds.
ON_LOOP_COPIES = 32


@dataclass(frozen=True)
class ComputeCall(Generic[T]):
    """A call on the compute stream: `launch(buffer)` enqueues it, and `result(buffer)` returns its result after it
    completes.

    It uses `num_bytes` of the arena. `reads` and `writes` are blocks of the pool. `seconds` is its estimated duration.
    The reference to `step` keeps the step's tables on the device until the call completes. `completes` are the
    blocks of a step that this call completes. They count as unfinished until then, unless that is before `start`
    returns.
    """

    step: StepPlan | None
    num_bytes: int
    reads: Array
    writes: Array
    seconds: float
    launch: Callable[[StagingBuffer], None]
    result: Callable[[StagingBuffer], T]
    completes: Array | None = None


@dataclass(frozen=True)
class InFlightCall(Generic[T]):
    call: ComputeCall[T]
    buffer: StagingBuffer
    completed: _cuda.Event


class Compute:
    """The compute stream of a device. Calls are submitted from the event loop only. The device must be the current one
    of all calling threads."""

    def __init__(self, cuda: ModuleType, device: int, mark_faulted: Callable[[], object]) -> None:
        """`mark_faulted` as in ByteQueue."""
        self._cuda = cuda
        self._device = device
        self.stream: _cuda.Stream = cuda.Stream(device, True)
        self.aside: _cuda.Stream = cuda.Stream(device)  # for work that does not wait for the compute stream
        on_start = partial(cuda.set_device, device)
        self.queue = ByteQueue(mark_faulted, (cuda.CudaError,), on_start)
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="completion", initializer=on_start)
        self._tables = LiveTables(self.allocate)
        self._newest: Future[Any] | None = None
        self._events: list[_cuda.Event] = []
        self.arena: Arena
        self.copies: Copies

    # ---- before a launch: allocations, which may fail

    def allocate(self, num_bytes: int) -> int:
        """Allocate device memory in stream order."""
        pointer: int = self._cuda.allocate_async(num_bytes, self.stream.handle)
        return pointer

    def free(self, pointer: int) -> None:
        self._cuda.free_async(pointer, self.stream.handle)

    def reserve(self, allocate: Callable[[], T]) -> T:
        """Run an allocation for a call. Raises ResourceExhaustedError if the device is out of memory."""
        if self.queue.fault is not None:
            raise InternalError("the device failed before")
        try:
            return allocate()
        except self._cuda.CudaError as error:
            if error.code == OUT_OF_MEMORY:
                raise ResourceExhaustedError(f"the GPU has no memory left for this call: {error}") from None
            raise self.queue.fail(error) from None

    def tables_of(self, step: StepPlan) -> DeviceStepTables:
        return self.reserve(lambda: self._tables.of(step))

    # ---- during a launch

    def upload(self, buffer: StagingBuffer, arrays: Sequence[Array], offsets: Sequence[int]) -> None:
        """Copy arrays to the device side of a buffer. `offsets` are the start of each array and the end of the last."""
        for array, offset in zip(arrays, offsets[:-1], strict=True):
            buffer.put(offset, array)
        self._cuda.copy_async(buffer.device_pointer, buffer.host_pointer, offsets[-1], self.stream.handle)

    def upload_tables(self, tables: DeviceStepTables, buffer: StagingBuffer, begin: int) -> None:
        """Upload a step's pending tables through the buffer, from offset `begin` on."""
        if tables.pending:
            for offset, part in tables.pending:
                buffer.put(begin + offset, part)
            host = buffer.host_pointer + begin
            self._cuda.copy_async(tables.pointer, host, tables.num_bytes, self.stream.handle)
            tables.pending = []

    def download(self, buffer: StagingBuffer, begin: int, end: int) -> None:
        to, source = buffer.host_pointer + begin, buffer.device_pointer + begin
        self._cuda.copy_async(to, source, end - begin, self.stream.handle)

    # ---- launching and waiting

    def post(self, copy: Callable[[Any, Any], None], target: Tier, src_ids: Array, dst_ids: Array) -> None:
        """Launch a copy of blocks to `target` in order."""
        if len(src_ids):
            target.unfinished.begin(dst_ids)
            self.queue.post(lambda: copy(src_ids, dst_ids), on_loop=len(src_ids) <= ON_LOOP_COPIES)

    def start(self, call: ComputeCall[T]) -> Awaitable[T]:
        """Launch a call in order. The caller awaits the result."""
        if call.num_bytes > self.arena.num_bytes:
            raise ResourceExhaustedError(
                f"the call needs {call.num_bytes} bytes of staging memory, the device has {self.arena.num_bytes}"
            )
        if self._is_quick(call):
            return ready(self._complete(self.queue.guarded(lambda: self._launch(call))))
        if call.completes is not None:
            self.copies.pool.unfinished.begin(call.completes)
        done: Future[T] = Future()
        self._newest = done
        self.queue.submit(lambda: self._launch_for(call, done))
        return awaited(done)

    def _is_quick(self, call: ComputeCall[T]) -> bool:
        """Return whether a call is short and nothing precedes it: no call in flight, including those of lanes, and no
        copy of its blocks."""
        if call.seconds > INLINE_S or not self.queue.idle or not (self._newest is None or self._newest.done()):
            return False
        if not self.arena.has_room(call.num_bytes) or not self.queue.guarded(self.stream.idle):
            return False
        return not self.queue.guarded(lambda: self.copies.to_wait_for(call.reads, call.writes))

    def _launch(self, call: ComputeCall[T]) -> InFlightCall[T]:
        while self._tables.garbage:
            self.free(self._tables.garbage.popleft())
        buffer = self.arena.allocate(call.num_bytes)
        try:
            self.copies.let_compute_wait(call.reads, call.writes)
            call.launch(buffer)
            event = self._events.pop() if self._events else self._cuda.Event(self._device)
            event.record(self.stream.handle)
        except BaseException:
            self.arena.release(buffer)  # otherwise a later `arena.allocate` would block forever
            raise
        return InFlightCall(call, buffer, event)

    def _launch_for(self, call: ComputeCall[T], done: Future[T]) -> None:
        try:
            in_flight = self.queue.guarded(lambda: self._launch(call))
        except BaseException as error:
            done.set_exception(error)
        else:
            self._waiter.submit(self._complete_for, in_flight, done)

    def _complete_for(self, in_flight: InFlightCall[T], done: Future[T]) -> None:
        try:
            result = self._complete(in_flight)
            # The stream runs in order, so the step's other layers are written too.
            if (completes := in_flight.call.completes) is not None:
                self.copies.pool.unfinished.end(completes)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    def _complete(self, in_flight: InFlightCall[T]) -> T:
        try:
            self.queue.guarded(in_flight.completed.synchronize)
            self._events.append(in_flight.completed)
            return in_flight.call.result(in_flight.buffer)
        finally:
            self.arena.release(in_flight.buffer)

    def close(self) -> None:
        """Finish all submitted work."""
        self.queue.close()
        self._waiter.shutdown(wait=True)
        if self.queue.fault is None:
            self.stream.synchronize()
            self.copies.close()
