"""What a device does for the engine, and in which order.

All of it is asked for on the event loop, and all of it takes effect in the order of asking: a block that one sequence
gives up and another gets is never written before it has been read. What the engine asks for has been checked; so an
error in it is a bug, or a device that fails, and leaves content that nobody knows: the device is faulted then, and the
daemon ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvservice.blocks import Step
from kvservice.ops.cuda import BlockSparse
from kvservice.pool.sealed import SealedMemory

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionOptions:
    """How scores are made. `scale` None: 1/sqrt(head_size). `sliding_window`, `logits_soft_cap` 0: off."""

    scale: float | None = None
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    alibi_slopes: Array | None = None
    block_sparse: BlockSparse | None = None


class LaneSession(Protocol):
    """What the lanes of one session may touch: its published steps, and regions of memory. Made by a device."""

    def retire(self, step_id: int) -> None:
        """Returns when no call uses the step, and none will."""

    def take_finished(self) -> list[int]:
        """Steps whose last layer was written by a lane since the last time."""

    def add_region(self, address: int, num_bytes: int) -> int:
        """A number for host memory that nobody can take away."""

    def remove_region(self, number: int) -> None:
        """Returns when no call uses the region, and none will."""

    def set_draining(self) -> None:
        """From now on steps of which no layer is written are refused."""


class LaneServer(Protocol):
    """A lane's thread."""

    @property
    def closed(self) -> bool:
        """It has ended, by `close` or because of what its client wrote into it."""

    @property
    def event_handle(self) -> bytes:
        """Of the event by which its calls can be waited for on a GPU; b"" on the CPU."""

    def close(self) -> None:
        """After the calls that run."""

    def stats(self) -> tuple[int, int, list[int], float]:
        """Calls, errors, how many calls fell into each bucket of seconds, seconds of all."""


class CudaRegion(Protocol):
    """A client's memory on the GPU, opened. `number` is what the entries of lanes call it."""

    number: int

    def check(self, end: int) -> None:
        """The driver keeps what is open."""

    def read(self, begin: int, num_bytes: int) -> Array:
        """A copy in host memory, uint8 `[num_bytes]`."""

    def write(self, begin: int, data: Array) -> None:
        """`data` uint8, in host memory."""

    def view(self, begin: int, num_bytes: int, /) -> None:
        """The host cannot look into it."""

    def close(self) -> None:
        """When no call uses it any more."""


@dataclass(frozen=True)
class PoolDescriptor:
    """The pool's memory, to be handed to another process."""

    descriptor: int
    num_bytes: int


class Device(Protocol):
    """Tensors are `[num_tokens, num_heads, head_size]`, C-contiguous, of the tensors' type, in host memory.

    `attend`, `write` and `read` take what they need before they return, and raise ResourceExhaustedError, with nothing
    changed, where that is not there; what they return is to be awaited. A caller that is cancelled does not cancel the
    work.
    """

    num_blocks: int
    num_swap_blocks: int
    memory_bytes: dict[str, int]
    """What was taken, by use: pool, swap, and what the device needs besides."""
    on_fault: Callable[[], object]
    """Called once, on any thread, when `fault` is set."""

    @property
    def fault(self) -> BaseException | None: ...

    @property
    def swap_busy_s(self) -> dict[str, float]:
        """Seconds for which copies to the swap tier ("out") and back ("in") have run."""

    def check_options(self, options: AttentionOptions) -> None:
        """Raise InvalidArgumentError naming the option that this device has no kernel for."""

    def copy(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Blocks of the pool over others. No destination is a source."""

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Blocks of the pool over blocks of the swap tier."""

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Blocks of the swap tier over blocks of the pool."""

    def attend(
        self,
        step: Step,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        options: AttentionOptions,
        out: Array | None = None,
        /,
    ) -> Awaitable[tuple[Array, Array]]:
        """Write one layer's K/V of a step, then attend. The output, in `out` if the device can put it there, and the
        log-sum-exp float32 `[num_tokens, num_heads]`."""

    def write(self, step: Step, layers: Sequence[int], keys: Array, values: Array) -> Awaitable[None]:
        """Write K/V of a step: `[len(layers), num_tokens, num_kv_heads, head_size]`."""

    def read(self, layers: Sequence[int], slots: Int64) -> Awaitable[tuple[Array, Array]]:
        """K/V of slots: `[len(layers), len(slots), num_kv_heads, head_size]` each."""

    lane_bytes: int
    """Of the memory that a lane takes."""
    lane_buckets_s: tuple[float, ...]
    """Upper bounds of all but the last bucket of `LaneServer.stats`."""

    def lane_session(self) -> LaneSession: ...

    def open_lane(self, memory: SealedMemory, session: LaneSession) -> LaneServer:
        """Serve a lane from a thread of its own. It attends in the order of its calls, after what was asked for before
        a step was published. A failure in it faults the device."""

    def open_cuda_region(
        self, session: LaneSession, raw_handle: bytes, device_id: int, byte_size: int, /
    ) -> CudaRegion:
        """Raises RegionsNotAllowedError where the pool is on no GPU, RegionNotOpenedError, InvalidArgumentError naming
        raw_handle (also where what it names is open already), device_id or byte_size."""

    def prepare(self, step: Step, /) -> Awaitable[None] | None:
        """Done, or None, when work that does not pass through here may begin on the step's blocks."""

    def publish(self, session: LaneSession, step: Step, written: bytearray) -> None:
        """Let the session's lanes work on a step that is prepared and live, marking the layers in `written`."""

    def exported_pool(self) -> AbstractContextManager[PoolDescriptor]:
        """The pool's descriptor, valid within the block."""

    def close(self) -> None:
        """Finish what has been asked for, then give everything back."""
