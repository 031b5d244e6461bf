"""Interface of devices to the engine.

The engine calls a device on the event loop only, and operations that use the same blocks take effect in call order, so
a block that moves from one sequence to another is never written before it has been read. The engine has validated all
arguments. An error during an operation is therefore a bug or a device failure and leaves the content of the pool
undefined; the device is then faulted, and the daemon exits.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.attention_options import AttentionOptions
from kvservice.blocks import StepPlan
from kvservice.blocks.plans import ArrayMemory
from kvservice.pool.sealed import SealedMemory

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
# The pool that attention reads, and the one of swapped-out sequences.
PoolName: TypeAlias = Literal["pool", "swap"]


class FinishedSteps(Protocol):
    """The steps whose last layer a lane has written, of all sessions. A device creates it."""

    @property
    def descriptor(self) -> int:
        """File descriptor that becomes readable when there are such steps, and is not readable after `take`."""

    def take(self) -> list[tuple[int, int]]:
        """Return (number of the session, step id) of the steps since the previous call, each once. A step is there
        before the call that wrote its last layer is complete for the client."""


class LaneSession(Protocol):
    """State that the lanes of one session may use: its published steps and memory regions. A device creates it."""

    def retire(self, step_id: int) -> None:
        """Withdraw a step. Returns when no call uses it, and none will."""

    def add_region(self, address: int, num_bytes: int) -> int:
        """Register host memory that cannot be unmapped or truncated. Returns its number."""

    def remove_region(self, number: int) -> None:
        """Unregister a region. Returns when no call uses it, and none will."""

    def set_draining(self) -> None:
        """Refuse calls of steps without a written layer from now on."""


class LaneServer(Protocol):
    """The thread that serves a lane."""

    @property
    def closed(self) -> bool:
        """Whether the lane has ended, by `close` or because its client wrote invalid data into it."""

    def close(self) -> None:
        """Stop the lane after its running calls."""

    def stats(self) -> tuple[int, int, list[int], float]:
        """Return (calls, errors, calls per latency bucket, total seconds)."""


class CudaRegion(Protocol):
    """A client's opened GPU memory. Lane entries refer to it by `number`."""

    number: int

    def check(self, end: int) -> None:
        """Do nothing: the driver keeps opened memory alive."""

    def read(self, begin: int, num_bytes: int) -> Array:
        """Return a copy in host memory, uint8 `[num_bytes]`."""

    def write(self, begin: int, data: Array) -> None:
        """Write `data`, uint8 in host memory."""

    def view(self, begin: int, num_bytes: int, /) -> None:
        """Return None: the host cannot access the memory."""

    def close(self) -> None:
        """Close the memory. No call may use it any more."""


@dataclass(frozen=True)
class PoolDescriptor:
    """Descriptor and size of the pool's memory, for fd passing to another process."""

    descriptor: int
    num_bytes: int


class Device(Protocol):
    """Interface of a device. Tensors are `[num_tokens, num_heads, head_size]`, C-contiguous, of the tensor dtype, in
    host memory.

    `attend`, `write` and `read` allocate what they need before they return, and raise ResourceExhaustedError, with
    nothing changed, if that fails. The caller awaits their result. Cancelling the caller does not cancel the work.
    """

    num_blocks: int
    num_swap_blocks: int
    memory_bytes: dict[str, int]
    """Bytes allocated, by use: pool, swap, and other needs of the device."""
    on_fault: Callable[[], object]
    """Called once, on any thread, when `fault` is set."""

    @property
    def fault(self) -> BaseException | None: ...

    @property
    def swap_busy_s(self) -> dict[str, float]:
        """Seconds spent in copies to the swap tier ("out") and back ("in")."""

    def check_options(self, options: AttentionOptions) -> None:
        """Check attention options. Raises InvalidArgumentError naming an option that this device has no kernel for."""

    # The destinations of copies count as unfinished until the copies are complete.

    def copy(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Copy blocks within the pool. No destination is a source."""

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Copy blocks of the pool to blocks of the swap tier."""

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Copy blocks of the swap tier to blocks of the pool."""

    # Copies between a pool and other host memory. They see the effects of all operations that were submitted before.
    # Until the result is there, the caller keeps the memory mapped, and does not let anything use the blocks that are
    # loaded; a saved block that is written meanwhile may be copied before, after or during that. Cancelling the caller
    # does not cancel the copy.

    def save_blocks(self, block_ids: Int32, addresses: UInt64, pool: PoolName = "pool", /) -> Awaitable[UInt64]:
        """Copy blocks int32[n] to host memory, block i to `addresses[i]`, uint64[n]. The result is the checksum of each
        block (csrc/store/checksum.h), uint64[n]."""

    def load_blocks(
        self, addresses: UInt64, block_ids: Int32, checksums: UInt64, pool: PoolName = "pool", /
    ) -> Awaitable[Bools]:
        """Copy blocks from host memory, from `addresses[i]` uint64[n] to the distinct block i of int32[n]. The result,
        bool[n], says which of them have the checksum in `checksums`, uint64[n]. The content of the others is undefined.
        The blocks count as unfinished until the copy is complete."""

    def attend(
        self,
        step: StepPlan,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        options: AttentionOptions,
        out: Array | None = None,
        /,
        *,
        completed: StepPlan | None = None,
    ) -> Awaitable[tuple[Array, Array]]:
        """Write one layer's K/V of a step, then attend. The result is the output, in `out` if the device supports that,
        and the log-sum-exp, float32 `[num_tokens, num_heads]`. `completed` is the step that this call
        completes, if it does. If its bytes are not all written when this returns, its blocks count as unfinished until
        they are."""

    def write(
        self, step: StepPlan, layers: Sequence[int], keys: Array, values: Array, *, completed: StepPlan | None = None
    ) -> Awaitable[None]:
        """Write K/V of a step: `[len(layers), num_tokens, num_kv_heads, head_size]`. `completed` as in `attend`."""

    def read(
        self, layers: Sequence[int], slots: Int64, out: tuple[Array, Array] | None = None
    ) -> Awaitable[tuple[Array, Array]]:
        """Read K and V of slots, each `[len(layers), len(slots), num_kv_heads, head_size]`. They are in `out` if given,
        arrays of this shape."""

    lane_bytes: int
    """Bytes of shared memory per lane."""
    lane_buckets_s: tuple[float, ...]
    """Upper bounds in seconds of all buckets of `LaneServer.stats` except the last one."""

    @property
    def finished_steps(self) -> FinishedSteps:
        """The steps completed by the lanes of all sessions."""

    def lane_session(self, number: int, kept_ids: Int64) -> LaneSession:
        """Create the lane state of a session. `number` identifies the session in `finished_steps`. Lanes store the id
        of a step in `kept_ids` int64[n], at id % n, before the call that wrote its last layer is complete."""

    def open_lane(self, memory: SealedMemory, session: LaneSession) -> LaneServer:
        """Serve a lane from a separate thread. It executes its calls in order, after all operations on the step's
        blocks that were submitted before the step was published. A failure in the lane faults the device."""

    def open_cuda_region(
        self, session: LaneSession, raw_handle: bytes, device_id: int, byte_size: int, /
    ) -> CudaRegion:
        """Open a client's GPU memory. Raises RegionsNotAllowedError if the pool is not on a GPU, RegionNotOpenedError,
        and InvalidArgumentError naming raw_handle (also if that memory is already open), device_id or byte_size."""

    def prepare(self, step: StepPlan, /) -> Awaitable[None] | None:
        """Return an awaitable that completes when work outside of this device may use the step's blocks, or None if it
        may use them now."""

    def publish(self, session: LaneSession, step: StepPlan, written: bytearray) -> None:
        """Make a prepared, live step available to the session's lanes, which mark its layers in `written`."""

    def exported_pool(self) -> AbstractContextManager[PoolDescriptor]:
        """Export the pool. The descriptor is valid within the `with` block."""

    def close(self) -> None:
        """Finish all submitted work, then release all resources."""


# ---- blocks whose bytes are still being written, for a process that takes the pool over
#
# The bookkeeping is ahead of the bytes: it counts a block as moved when its copy is submitted, and a token as
# computed when the last layer of its step is submitted. A block whose count is not zero when the process is killed
# may lack bytes.


_ONE = np.int32(1)


class UnfinishedBlocks:
    """The number of operations in progress that write each block of a tier, int32 `[num_blocks]`, in kept memory."""

    def __init__(self, memory: ArrayMemory, name: str, num_blocks: int) -> None:
        """`name` is "unfinished_device" for the pool and "unfinished_swap" for the swap tier."""
        self.counts: Int32 = memory.kept(name, (num_blocks,), np.int32, private=True)
        self._lock = threading.Lock()

    def begin(self, blocks: Array) -> None:
        """Count an operation that writes these blocks, before the bookkeeping counts on it. A block may be repeated."""
        with self._lock:
            np.add.at(self.counts, blocks, _ONE)

    def end(self, blocks: Array) -> None:
        """End an operation, with the blocks that it began with. Any thread may call this."""
        with self._lock:
            np.subtract.at(self.counts, blocks, _ONE)
