"""What a device does for the engine, and in which order.

All of it is asked for on the event loop, and all of it takes effect in the order of asking: a block that one sequence
gives up and another gets is never written before it has been read. What the engine asks for has been checked; so an
error in it is a bug, or a device that fails, and leaves content that nobody knows: the device is faulted then, and the
daemon ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvservice.blocks import Step
from kvservice.ops.cuda import BlockSparse

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

    def check_options(self, options: AttentionOptions) -> None:
        """Raise InvalidArgumentError naming the option that this device has no kernel for."""

    def copy(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Blocks of the pool over others. No destination is a source."""

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Blocks of the pool over blocks of the swap tier."""

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        """Blocks of the swap tier over blocks of the pool."""

    def attend(
        self, step: Step, layer: int, query: Array, key: Array, value: Array, options: AttentionOptions
    ) -> Awaitable[tuple[Array, Array]]:
        """Write one layer's K/V of a step, then attend. The output, and the log-sum-exp float32
        `[num_tokens, num_heads]`."""

    def write(self, step: Step, layers: Sequence[int], keys: Array, values: Array) -> Awaitable[None]:
        """Write K/V of a step: `[len(layers), num_tokens, num_kv_heads, head_size]`."""

    def read(self, layers: Sequence[int], slots: Int64) -> Awaitable[tuple[Array, Array]]:
        """K/V of slots: `[len(layers), len(slots), num_kv_heads, head_size]` each."""

    def close(self) -> None:
        """Finish what has been asked for, then give everything back."""
