"""Copies between the blocks of vLLM on a GPU and the store.

    a save:  reserve ─▶ launch the copy ─▶ on another thread: wait for the copy, commit
    a load:  lease   ─▶ launch the copy ─▶ on another thread: wait for the copy, check, end the lease
    a load of a step: launch the copy, computations wait for it on the GPU ─▶ after the step: check

The GPU copies between vLLM's tensors and the mapped memory of the store, see BlockPieces. That memory must be pinned: a
thread pins it slab by slab from the first moment. Blocks in memory that is not pinned yet, or cannot be, go through
pinned memory of the process, a StagedCopier. Several copies are in flight, so that the link is busy while the
daemon is asked for the next blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvservice.client import PutStatus
from kvservice.client.store.values import some_keys
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.vllm.copies import (
    CALL_BYTES,
    BlockCopier,
    BlockLayout,
    Flags,
    HostCopier,
    Statuses,
    StepRead,
    done,
)
from kvservice.integrations.vllm.steps import BlockIds, LeasedBlocks
from kvservice.ops import cuda
from kvservice.ops.block_pieces import (
    ALIGNMENT,
    MAX_BLOCK_BYTES,
    STAGE_BYTES,
    SUMS_PER_BLOCK,
    BlockPieces,
    PageLock,
    StreamMark,
    page_lock,
    stream_mark,
    use_device,
)
from kvservice.ops.cuda import HOST, DeviceArray

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.uint64]

# About the most bytes of one call without staging: the saves of a step are one, because each asks the daemon twice in a
# process that computes. The daemon is asked meanwhile for the blocks of the next.
MAPPED_CALL_BYTES = 1 << 30
# Most loads, and most saves, that have started and not ended.
IN_FLIGHT = 4
# Locking a slab holds up the GPU's other work. While vLLM computes, the thread that locks rests this many times as long
# as it works. It takes vLLM for computing for some seconds after a step.
RESTS = 4
BUSY_S = 0.25
# How often it looks for more slabs of a store whose memory the daemon still allocates.
GROWS_S = 0.25


def block_copier(layout: BlockLayout, *, verify: bool = False) -> BlockCopier:
    """Return what copies the blocks of a layout. `verify`: a block whose checksum is wrong is not right. Raises
    InvalidArgumentError for a device that is not supported."""
    kinds = {memory.device.type for memory in layout.memories}
    if kinds == {"cpu"}:
        return HostCopier(layout, verify=verify)
    if kinds != {"cuda"}:
        raise InvalidArgumentError(f"K/V caches on {', '.join(sorted(kinds))} are not supported", field="kv_caches")
    staged = StagedCopier(layout, verify=verify)
    if not GpuBlocks.supports(layout):
        logger.warning("kvservice was built without CUDA, or blocks are not aligned to 16 bytes: they are copied twice")
        return staged
    try:
        return MappedCopier(GpuBlocks(layout), staged, verify=verify)
    except RuntimeError as error:  # the extension's CudaError
        logger.warning("the device has no memory for copies, blocks are copied twice: %s", error)
        return staged


class Passing(Protocol):
    def synchronize(self) -> None:
        """Wait for the end of a copy."""


class PassingSave(Passing, Protocol):
    def checksums(self) -> Numbers:
        """Return the checksum of each block, after the end of the copy."""


class LockingGpu(Protocol):
    """See GpuBlocks."""

    def page_lock(self, address: int, num_bytes: int, *, read_only: bool) -> Any: ...

    def wait_for_copies(self) -> None: ...


class CopyingGpu(LockingGpu, Protocol):
    """See GpuBlocks."""

    def mark(self) -> Any: ...

    def follow(self, passing: Any) -> None: ...

    def load(self, addresses: Numbers, block_ids: BlockIds, mark: Any) -> Passing: ...

    def save(self, addresses: Numbers, block_ids: BlockIds, mark: Any) -> PassingSave: ...


class MappedCopier:
    """A BlockCopier without a copy in between. It uses `staged` if the store is not mapped or its memory is not
    pinned, for saves if the store is mapped for reading only, and for loads that compare checksums."""

    call_bytes = MAPPED_CALL_BYTES

    def __init__(self, gpu: CopyingGpu, staged: BlockCopier, *, verify: bool) -> None:
        self._gpu, self._staged, self.verifies = gpu, staged, verify
        self._locks = PageLocks(gpu)
        self._loads, self._saves = _Ends("kvservice-load-ends"), _Ends("kvservice-save-ends")

    def use(self, memory: Any) -> None:
        self._locks.use(memory)

    @property
    def has_locked(self) -> bool:
        """Whether nothing is left to be pinned, or nothing can be."""
        return self._locks.complete

    def mark(self) -> Any:
        self._locks.busy()
        return self._gpu.mark()

    def get(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Flags]:
        if store.memory is None or self.verifies:
            return self._staged.get(store, keys, block_ids, mark)
        with ExitStack() as undo:
            lease = undo.enter_context(store.acquire(keys))
            found = lease.found
            if not found.any():
                return done(found)
            addresses, ids = lease.addresses[found], block_ids[found]
            with self._loads.room(), self._locks.covering(lease.memory, addresses) as locked:
                if locked:
                    undo.callback(self._gpu.wait_for_copies)  # a part of the copy may have been launched
                    passing = self._gpu.load(addresses, ids, mark)

                    def end() -> Flags:
                        """Return which blocks are right: those whose lease did not end during the copy."""
                        passing.synchronize()
                        right: Flags = lease.check()
                        return right

                    result = self._loads.submit(lease, end)
                    undo.pop_all()
                    return result
        return self._staged.get(store, keys, block_ids, mark)

    def put(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Statuses]:
        memory = store.memory
        if memory is None or not memory.writable:
            return self._staged.put(store, keys, block_ids, mark)
        with ExitStack() as undo:
            reservation = undo.enter_context(store.reserve(keys))
            reserved = reservation.reserved
            if not reserved.any():
                return done(reservation.statuses)
            addresses, ids = reservation.addresses[reserved], block_ids[reserved]
            with self._saves.room(), self._locks.covering(reservation.memory, addresses) as locked:
                if locked:
                    undo.callback(self._gpu.wait_for_copies)
                    passing = self._gpu.save(addresses, ids, mark)

                    def end() -> Statuses:
                        passing.synchronize()
                        statuses: Statuses = reservation.statuses.copy()
                        checksums = np.zeros(len(statuses), np.uint64)
                        checksums[reserved] = passing.checksums()
                        if reservation.commit(checksums=checksums) != np.count_nonzero(reserved):
                            statuses[reserved] = PutStatus.UNREACHABLE
                        return statuses

                    result = self._saves.submit(reservation, end)
                    undo.pop_all()
                    return result
        return self._staged.put(store, keys, block_ids, mark)

    def fetch(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds, mark: Any) -> Future[Flags]:
        addresses = memory.addresses(leased.offsets)
        with ExitStack() as undo, self._loads.room(), self._locks.covering(memory, addresses) as locked:
            if locked:
                undo.callback(self._gpu.wait_for_copies)
                passing = self._gpu.load(addresses, block_ids, mark)

                def end() -> Flags:
                    passing.synchronize()
                    right: Flags = memory.unchanged(leased.offsets, leased.versions)
                    return right

                result = self._loads.submit(nullcontext(), end)
                undo.pop_all()
                return result
        return self._staged.fetch(memory, leased, block_ids, mark)

    def read(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds) -> StepRead:
        addresses = memory.addresses(leased.offsets)
        if not self.verifies:
            with ExitStack() as undo, self._locks.covering(memory, addresses) as locked:
                if locked:
                    undo.callback(self._gpu.wait_for_copies)
                    passing = self._gpu.load(addresses, block_ids, self._gpu.mark())
                    self._gpu.follow(passing)
                    undo.pop_all()

                    def end() -> Flags:
                        passing.synchronize()
                        right: Flags = memory.unchanged(leased.offsets, leased.versions)
                        return right

                    return StepRead(end)
        return self._staged.read(memory, leased, block_ids)

    def close(self) -> None:
        self._loads.close()
        self._saves.close()
        self._locks.close()
        self._staged.close()


class _Ends:
    """A thread that ends copies of one direction in the order of their launch. The room for copies in flight is
    limited."""

    def __init__(self, name: str) -> None:
        self._free = threading.BoundedSemaphore(IN_FLIGHT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._kept = False

    @contextmanager
    def room(self) -> Iterator[None]:
        """Wait for room. It is free again at the end of the block, or when the submitted copy has ended."""
        self._free.acquire()
        self._kept = False
        try:
            yield
        finally:
            if not self._kept:
                self._free.release()

    def submit(self, holding: Any, end: Callable[[], Any]) -> Future[Any]:
        """Wait for a copy, then end its lease or reservation. The result does not wait for the end of the lease."""
        result: Future[Any] = Future()
        self._thread.submit(self._end, result, holding, end)
        self._kept = True
        return result

    def close(self) -> None:
        self._thread.shutdown()

    def _end(self, result: Future[Any], holding: Any, end: Callable[[], Any]) -> None:
        try:
            with holding:
                result.set_result(end())
        except Exception as error:
            if result.done():
                logger.exception("a lease could not be ended")
            else:
                result.set_exception(error)
        finally:
            self._free.release()


class PageLocks:
    """Locks on one mapping at a time, so that a GPU can copy from and to it. A thread locks slab by slab, those first
    that are asked for: a slab takes milliseconds, a large store seconds. Nothing else ever locks. `memory` is a
    MappedStore."""

    def __init__(self, gpu: LockingGpu) -> None:
        self._gpu = gpu
        self._wanted: Any = None
        self._memory: Any = None  # only the thread changes it
        self._slabs: dict[int, Any] = {}
        self._asked: deque[int] = deque(maxlen=4096)
        self._next = 0
        self._refused = self._closed = False
        self._busy_s = -BUSY_S
        self._num_covering = 0
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvservice-page-locks", daemon=True)
        self._thread.start()

    def use(self, memory: Any) -> None:
        """Lock this mapping from now on, and unlock any other; None: no mapping."""
        if memory is not self._wanted:
            self._wanted = memory
            self._wake.set()

    @property
    def complete(self) -> bool:
        """Whether everything is locked that can be."""
        with self._lock:
            memory = self._memory
            if memory is not self._wanted:
                return False
            return memory is None or self._refused or len(self._slabs) == memory.num_slabs

    def busy(self) -> None:
        """vLLM computes now: the thread does not hurry."""
        self._busy_s = time.monotonic()

    @contextmanager
    def covering(self, memory: Any, addresses: Numbers) -> Iterator[bool]:
        """Yield whether the slabs of these blocks are locked. They are not unlocked before copies end that are launched
        inside of the block."""
        slabs = np.unique((addresses - np.uint64(memory.address)) // np.uint64(memory.slab_bytes)).tolist()
        with self._lock:
            missing = slabs if memory is not self._memory else [slab for slab in slabs if slab not in self._slabs]
            self._asked.extendleft(reversed(missing))
            self._num_covering += 1
        try:
            yield not missing
        finally:
            with self._lock:
                self._num_covering -= 1
                self._lock.notify()

    def close(self) -> None:
        """Unlock everything."""
        self._closed = True
        self._closing.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._closed:
                break
            if self._wanted is not self._memory:
                self._unlock()
            slab = self._take()
            if slab is None:
                self._wake.wait(None if self.complete else GROWS_S)
                continue
            began = time.monotonic()
            memory = self._memory
            lock = self._gpu.page_lock(
                memory.address + slab * memory.slab_bytes, memory.slab_bytes, read_only=not memory.writable
            )
            with self._lock:
                if lock is None:
                    logger.warning("the memory of the store cannot be page-locked: blocks are copied twice")
                    self._refused = True
                else:
                    self._slabs[slab] = lock
            now = time.monotonic()
            if now - self._busy_s < BUSY_S:
                self._closing.wait(RESTS * (now - began))
        self._wanted = None
        self._unlock()

    def _take(self) -> int | None:
        """Return the slab that is locked next, or None if there is none."""
        if self._memory is None or self._refused:
            return None
        count = self._memory.num_slabs
        with self._lock:
            while self._asked:
                slab = self._asked.popleft()
                if slab not in self._slabs and slab < count:
                    return slab
            while self._next < count and self._memory.has_slab(self._next):
                self._next += 1
                if self._next - 1 not in self._slabs:
                    return self._next - 1
        return None

    def _unlock(self) -> None:
        """Unlock everything after the copies in flight, and go on with the mapping that is wanted."""
        with self._lock:
            slabs, self._slabs, self._memory = self._slabs, {}, None  # nothing is covered from now on
            self._lock.wait_for(lambda: not self._num_covering)
        if slabs:
            self._gpu.wait_for_copies()
        for lock in slabs.values():
            lock.close()
        with self._lock:
            self._asked.clear()
            self._memory, self._next, self._refused = self._wanted, 0, False


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark stands for the work that was on a stream when it was made, and has the methods of torch.cuda.Event that
    are called here. vLLM's thread makes marks in each step: torch would give the interpreter lock away meanwhile, and
    get it back after milliseconds."""

    native: StreamMark

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let what is put on a stream from now on wait for it."""
        self.native.make_wait(stream.cuda_stream)

    def synchronize(self) -> None:
        """Wait for it."""
        self.native.synchronize()


@dataclass(frozen=True, eq=False)
class Save:
    """A copy to host memory. It keeps the memory in which the GPU computes checksums: `values` are those of the blocks
    with the numbers `order`."""

    mark: Mark
    sums: torch.Tensor
    values: torch.Tensor
    order: npt.NDArray[np.intp]

    def synchronize(self) -> None:
        """Wait for the end of the copy."""
        self.mark.synchronize()

    def checksums(self) -> Numbers:
        """Return the checksum of each block, after the end of the copy."""
        checksums = np.empty(len(self.order), np.uint64)
        checksums[self.order] = self.values.numpy().view(np.uint64)
        return checksums


class GpuBlocks:
    """Copies run on streams of their own, one for each direction. They begin after the computations of their `mark` and
    have ended when the mark that they return has passed."""

    def __init__(self, layout: BlockLayout, stage_bytes: int = STAGE_BYTES) -> None:
        self._device, self._index = layout.memories[0].device, layout.memories[0].get_device()
        starts = [memory.data_ptr() + start for memory, start in zip(layout.memories, layout.starts, strict=True)]
        table = np.array([starts, layout.strides, np.cumsum(layout.piece_bytes)], np.int64)
        self._memories = layout.memories
        self._table = torch.from_numpy(table).to(self._device)
        self._pieces = BlockPieces(_array(self._table), layout.num_blocks, layout.block_bytes, stage_bytes)
        # Kernels between device memory and the stages are short, and the link must not wait for them.
        self._loads = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._saves = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    @staticmethod
    def supports(layout: BlockLayout) -> bool:
        """Whether kvservice has its kernels, and the blocks are aligned as these need it."""
        addresses = [memory.data_ptr() + start for memory, start in zip(layout.memories, layout.starts, strict=True)]
        aligned = all(number % ALIGNMENT == 0 for number in (*addresses, *layout.strides, *layout.piece_bytes))
        one_device = len({memory.device for memory in layout.memories}) == 1
        return aligned and one_device and layout.block_bytes <= MAX_BLOCK_BYTES and cuda.available()

    def mark(self) -> Mark:
        """Return the computations that are queued now."""
        return self._mark(self._computing())

    def follow(self, passing: Mark) -> None:
        """Let the computations that are queued from now on wait for a load."""
        passing.native.make_wait(self._computing())

    def load(self, addresses: Numbers, block_ids: BlockIds, mark: Mark) -> Mark:
        """Fill blocks with the values at `addresses`."""
        use_device(self._index)
        mark.native.make_wait(self._loads.cuda_stream)
        self._pieces.load(addresses, block_ids, stream=self._loads.cuda_stream)
        return self._mark(self._loads.cuda_stream)

    def save(self, addresses: Numbers, block_ids: BlockIds, mark: Mark) -> Save:
        """Copy blocks to `addresses`, and compute their checksums."""
        use_device(self._index)
        mark.native.make_wait(self._saves.cuda_stream)
        with torch.cuda.stream(self._saves):
            sums = torch.empty((len(block_ids), SUMS_PER_BLOCK), dtype=torch.int64, device=self._device)
            checksums = torch.empty(len(block_ids), dtype=torch.int64, pin_memory=True)
        order = self._pieces.save(
            addresses, block_ids, sums=_array(sums), checksums=_array(checksums), stream=self._saves.cuda_stream
        )
        return Save(self._mark(self._saves.cuda_stream), sums, checksums, order)

    def wait_for_copies(self) -> None:
        """Wait for all copies."""
        self._pieces.wait_for_copies()
        self._loads.synchronize()
        self._saves.synchronize()

    def page_lock(self, address: int, num_bytes: int, *, read_only: bool) -> PageLock | None:
        """Page-lock memory for copies. Returns None if the system refuses."""
        return page_lock(address, num_bytes, device=self._index, read_only=read_only)

    def _mark(self, stream: int) -> Mark:
        return Mark(stream_mark(stream, device=self._index))

    def _computing(self) -> int:
        """Return the stream of vLLM's computations, without the objects of torch.cuda.current_stream."""
        return torch._C._cuda_getCurrentRawStream(self._index)


class StagedCopier:
    """Copies blocks of a GPU through pinned host memory, each kind of call through a buffer and a stream of its own."""

    call_bytes = CALL_BYTES

    def __init__(self, layout: BlockLayout, *, verify: bool) -> None:
        self.verifies = verify
        self._device = layout.memories[0].device
        self._gets, self._puts, self._reads = (_Staging(layout) for _ in range(3))

    def use(self, memory: Any) -> None:
        """Nothing has to be prepared."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def get(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Flags]:
        def fill(part: slice, staged: torch.Tensor) -> Flags:
            found: Flags = store.get(some_keys(keys, part), staged, verify=self.verifies)
            return found

        return done(self._gets.load(block_ids, mark, fill))

    def put(self, store: Any, keys: bytes, block_ids: BlockIds, mark: Any) -> Future[Statuses]:
        def store_part(part: slice, staged: torch.Tensor) -> Statuses:
            statuses: Statuses = store.put(some_keys(keys, part), staged)
            return statuses

        return done(self._puts.save(block_ids, mark, store_part))

    def fetch(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds, mark: Any) -> Future[Flags]:
        return done(self._gets.load(block_ids, mark, _reader(memory, leased)))

    def read(self, memory: Any, leased: LeasedBlocks, block_ids: BlockIds) -> StepRead:
        """The copies have ended when this returns, so that computations need not wait."""
        return StepRead.ended(self._reads.load(block_ids, self.mark(), _reader(memory, leased)))

    def close(self) -> None:
        """Nothing is in use between calls."""


def _reader(memory: Any, leased: LeasedBlocks) -> Callable[[slice, torch.Tensor], Flags]:
    """Return what fills a buffer for a part of leased blocks, and returns which of them are right."""

    def fill(part: slice, staged: torch.Tensor) -> Flags:
        of_part = leased[part]
        right: Flags = memory.read(of_part.offsets, of_part.versions, staged)
        return right

    return fill


class _Staging:
    """A pinned buffer and a stream."""

    def __init__(self, layout: BlockLayout) -> None:
        self._pieces = [
            memory.as_strided((layout.num_blocks, num_bytes), (stride, 1), start)
            for memory, start, stride, num_bytes in zip(
                layout.memories, layout.starts, layout.strides, layout.piece_bytes, strict=True
            )
        ]
        self._device = layout.memories[0].device
        shape = (max(1, CALL_BYTES // layout.block_bytes), layout.block_bytes)
        self._buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def load(self, block_ids: BlockIds, mark: Any, fill: Callable[[slice, torch.Tensor], Flags]) -> Flags:
        """`fill` fills the buffer for a part of the blocks, and returns which of them are right."""
        mark.wait(self._stream)
        found = []
        for part, buffer in self._parts(len(block_ids)):
            found.append(fill(part, buffer))
            with torch.cuda.stream(self._stream):
                staged = buffer.to(self._device, non_blocking=True)
                right = torch.from_numpy(found[-1]).to(self._device)
                blocks = torch.tensor(block_ids[part], device=self._device)[right]
                sizes = [piece.shape[1] for piece in self._pieces]
                for piece, values in zip(self._pieces, torch.split(staged[right], sizes, dim=1), strict=True):
                    piece[blocks] = values
            self._stream.synchronize()
        return np.concatenate(found)

    def save(self, block_ids: BlockIds, mark: Any, store: Callable[[slice, torch.Tensor], Statuses]) -> Statuses:
        """`store` stores a part of the blocks from the buffer."""
        mark.wait(self._stream)
        statuses = []
        for part, buffer in self._parts(len(block_ids)):
            with torch.cuda.stream(self._stream):
                blocks = torch.tensor(block_ids[part], device=self._device)
                buffer.copy_(torch.cat([piece[blocks] for piece in self._pieces], dim=1), non_blocking=True)
            self._stream.synchronize()
            statuses.append(store(part, buffer))
        return np.concatenate(statuses)

    def _parts(self, count: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the parts of a batch that fit the buffer, and the buffer for each."""
        for first in range(0, count, len(self._buffer)):
            part = slice(first, min(first + len(self._buffer), count))
            yield part, self._buffer[: part.stop - part.start]


def _array(tensor: torch.Tensor) -> DeviceArray:
    """Describe a tensor of int64."""
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), "int64", tensor.device.index if tensor.is_cuda else HOST)
