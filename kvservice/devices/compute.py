"""The compute stream: calls are launched on it in the order of asking, and waited for.

A call is: tensors up, kernels, results down, an event. One that is short, with nothing long before it, is launched and
waited for on the event loop, for that costs less than a hop to a thread and back. Any other is launched by one thread
and waited for by another, so that calls which come meanwhile are launched behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvservice.blocks import Step
from kvservice.devices.arena import Arena, Region
from kvservice.devices.base import Array
from kvservice.devices.bytequeue import ByteQueue
from kvservice.devices.copies import Copies
from kvservice.devices.tables import LiveTables, StepTables
from kvservice.errors import InternalError, ResourceExhaustedError
from kvservice.pool.cuda import OUT_OF_MEMORY

if TYPE_CHECKING:
    from kvservice import _cuda

T = TypeVar("T")

# How long a call may hold the event loop.
INLINE_S = 100e-6
# More copies than this are not launched on the event loop: a launch takes microseconds.
INLINE_COPIES = 32


@dataclass(frozen=True)
class Call(Generic[T]):
    """`launch(region)` puts it on the compute stream, `result(region)` is what came of it when that is done.

    `num_bytes` of the arena are its own. `reads` and `writes` are blocks of the pool. `seconds` is how long it is
    foreseen to take. `step` is kept until it is over, and with it the step's tables on the device.
    """

    step: Step | None
    num_bytes: int
    reads: Array
    writes: Array
    seconds: float
    launch: Callable[[Region], None]
    result: Callable[[Region], T]


@dataclass(frozen=True)
class Flight(Generic[T]):
    call: Call[T]
    region: Region
    landed: _cuda.Event


class Compute:
    """Submitted to from the event loop only; the device is that of the calling threads."""

    def __init__(self, cuda: ModuleType, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self.stream: _cuda.Stream = cuda.Stream(device, True)
        self.aside: _cuda.Stream = cuda.Stream(device)  # for what need not wait for it
        on_start = partial(cuda.set_device, device)
        self.queue = ByteQueue((cuda.CudaError,), on_start)
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="landing", initializer=on_start)
        self._tables = LiveTables(self.allocate)
        self._newest: Future[Any] | None = None
        self._events: list[_cuda.Event] = []
        self.arena: Arena
        self.copies: Copies

    # ---- before anything is changed

    def allocate(self, num_bytes: int) -> int:
        """Memory in the order of the stream."""
        pointer: int = self._cuda.allocate_async(num_bytes, self.stream.handle)
        return pointer

    def free(self, pointer: int) -> None:
        self._cuda.free_async(pointer, self.stream.handle)

    def reserve(self, take: Callable[[], T]) -> T:
        """What a call needs. Raises ResourceExhaustedError where the device has no memory left for it."""
        if self.queue.fault is not None:
            raise InternalError("the device failed before")
        try:
            return take()
        except self._cuda.CudaError as error:
            if error.code == OUT_OF_MEMORY:
                raise ResourceExhaustedError(f"the GPU has no memory left for this call: {error}") from None
            raise self.queue.fail(error) from None

    def tables_of(self, step: Step) -> StepTables:
        return self.reserve(lambda: self._tables.of(step))

    # ---- in a launch

    def upload(self, region: Region, arrays: Sequence[Array], offsets: Sequence[int]) -> None:
        """Arrays to the device's side of a region, where `offsets` say that each begins and the last ends."""
        for array, offset in zip(arrays, offsets[:-1], strict=True):
            region.put(offset, array)
        self._cuda.copy_async(region.device_pointer, region.host_pointer, offsets[-1], self.stream.handle)

    def upload_tables(self, tables: StepTables, region: Region, begin: int) -> None:
        """By way of the region, from `begin` on."""
        if tables.pending:
            for offset, part in tables.pending:
                region.put(begin + offset, part)
            host = region.host_pointer + begin
            self._cuda.copy_async(tables.pointer, host, tables.num_bytes, self.stream.handle)
            tables.pending = []

    def download(self, region: Region, begin: int, end: int) -> None:
        to, source = region.host_pointer + begin, region.device_pointer + begin
        self._cuda.copy_async(to, source, end - begin, self.stream.handle)

    # ---- launching and waiting

    def post(self, copy: Callable[[Any, Any], None], src_ids: Array, dst_ids: Array) -> None:
        """A copy of blocks, in its turn."""
        if len(src_ids):
            self.queue.post(lambda: copy(src_ids, dst_ids), inline=len(src_ids) <= INLINE_COPIES)

    def start(self, call: Call[T]) -> Awaitable[T]:
        """Launch in its turn; what is returned waits for the result."""
        if call.num_bytes > self.arena.num_bytes:
            raise ResourceExhaustedError(
                f"the call takes {call.num_bytes} bytes on the device, there is room for {self.arena.num_bytes}"
            )
        if self._is_quick(call):
            return self._land_here(self.queue.guarded(lambda: self._launch(call)))
        done: Future[T] = Future()
        self._newest = done
        self.queue.submit(lambda: self._launch_for(call, done))
        return _awaited(done)

    def _is_quick(self, call: Call[T]) -> bool:
        """Whether it is short, and nothing stands before it: no call that is under way, of a lane's either, no copy of
        its blocks."""
        if call.seconds > INLINE_S or not self.queue.idle or not (self._newest is None or self._newest.done()):
            return False
        if not self.arena.has_room(call.num_bytes) or not self.queue.guarded(self.stream.idle):
            return False
        return not self.queue.guarded(lambda: self.copies.hold_up(call.reads, call.writes))

    def _launch(self, call: Call[T]) -> Flight[T]:
        while self._tables.garbage:
            self.free(self._tables.garbage.popleft())
        region = self.arena.take(call.num_bytes)
        try:
            self.copies.let_compute_wait(call.reads, call.writes)
            call.launch(region)
            event = self._events.pop() if self._events else self._cuda.Event(self._device)
            event.record(self.stream.handle)
        except BaseException:
            self.arena.release(region)  # or who waits for room would wait for ever
            raise
        return Flight(call, region, event)

    def _launch_for(self, call: Call[T], done: Future[T]) -> None:
        try:
            flight = self.queue.guarded(lambda: self._launch(call))
        except BaseException as error:
            done.set_exception(error)
        else:
            self._waiter.submit(self._land_for, flight, done)

    def _land_for(self, flight: Flight[T], done: Future[T]) -> None:
        try:
            result = self._land(flight)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    async def _land_here(self, flight: Flight[T]) -> T:
        return self._land(flight)

    def _land(self, flight: Flight[T]) -> T:
        try:
            self.queue.guarded(flight.landed.synchronize)
            self._events.append(flight.landed)
            return flight.call.result(flight.region)
        finally:
            self.arena.release(flight.region)

    def close(self) -> None:
        """Finish what has been submitted."""
        self.queue.close()
        self._waiter.shutdown(wait=True)
        if self.queue.fault is None:
            self.stream.synchronize()
            self.copies.synchronize()


async def _awaited(done: Future[T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(done))
