"""Copies between the blocks of vLLM and the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvservice.client import Scatter
from kvservice.integrations.vllm.layout import BlockLayout

Flags = npt.NDArray[np.bool_]
Statuses = npt.NDArray[np.uint8]
T = TypeVar("T")

# The most bytes of one call that copies before it returns.
CALL_BYTES = 16 << 20


class BlockCopier(Protocol):
    """Copies blocks of vLLM to and from a store of the client. One thread uses it.

    A call may return before the copy has ended, and the next copy may start then. The blocks are in use until the
    result is there. `call_bytes` are about the most bytes of one call, one block at least.
    """

    call_bytes: int

    def mark(self) -> Any:
        """Return what copies wait for: the computations that are queued now. Any thread may call this."""

    def get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> Future[Flags]:
        """Fill blocks. The result is which of them are right."""

    def put(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> Future[Statuses]:
        """Store blocks. The result is the PutStatus of each."""

    def close(self) -> None:
        """Wait for all copies, and free what they used."""


class HostCopier:
    """Copies between the store and blocks in host memory, without a copy in between."""

    call_bytes = CALL_BYTES

    def __init__(self, layout: BlockLayout, *, verify: bool) -> None:
        self._layout, self._verify = layout, verify
        self._starts = np.array(layout.starts, np.int64)
        self._strides = np.array(layout.strides, np.int64)

    def mark(self) -> None:
        return None

    def get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> Future[Flags]:  # noqa: ARG002
        return done(store.get(keys, self._places(block_ids), verify=self._verify))

    def put(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> Future[Statuses]:  # noqa: ARG002
        return done(store.put(keys, self._places(block_ids)))

    def close(self) -> None:
        """Nothing is in use between calls."""

    def _places(self, block_ids: Sequence[int]) -> Scatter:
        offsets = self._starts + np.asarray(block_ids, np.int64)[:, None] * self._strides
        return Scatter(self._layout.memories, offsets, self._layout.piece_bytes)


class StagedCopier:
    """Copies blocks of a GPU through pinned host memory, on a stream of its own."""

    call_bytes = CALL_BYTES

    def __init__(self, layout: BlockLayout, *, verify: bool) -> None:
        self._verify = verify
        self._pieces = [
            memory.as_strided((layout.num_blocks, num_bytes), (stride, 1), start)
            for memory, start, stride, num_bytes in zip(
                layout.memories, layout.starts, layout.strides, layout.piece_bytes, strict=True
            )
        ]
        self._device = layout.memories[0].device
        self._staging = _pinned(max(1, CALL_BYTES // layout.block_bytes), layout.block_bytes)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: torch.cuda.Event) -> Future[Flags]:
        self._stream.wait_event(mark)
        return done(np.concatenate([self._get(store, keys[part], block_ids[part]) for part in self._calls(keys)]))

    def put(
        self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: torch.cuda.Event
    ) -> Future[Statuses]:
        self._stream.wait_event(mark)
        return done(np.concatenate([self._put(store, keys[part], block_ids[part]) for part in self._calls(keys)]))

    def close(self) -> None:
        """Nothing is in use between calls."""

    def _get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int]) -> Flags:
        found: Flags = store.get(keys, self._staging[: len(keys)], verify=self._verify)
        with torch.cuda.stream(self._stream):
            staged = self._staging[: len(keys)].to(self._device, non_blocking=True)
            right = torch.from_numpy(found).to(self._device)
            blocks = torch.tensor(block_ids, device=self._device)[right]
            for piece, part in zip(self._pieces, self._parts(staged[right]), strict=True):
                piece[blocks] = part
        self._stream.synchronize()
        return found

    def _put(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int]) -> Statuses:
        staging = self._staging[: len(keys)]
        with torch.cuda.stream(self._stream):
            blocks = torch.tensor(block_ids, device=self._device)
            staging.copy_(torch.cat([piece[blocks] for piece in self._pieces], dim=1), non_blocking=True)
        self._stream.synchronize()
        statuses: Statuses = store.put(keys, staging)
        return statuses

    def _calls(self, keys: Sequence[bytes]) -> Iterator[slice]:
        """Yield the parts of a batch that fit the pinned memory."""
        for first in range(0, len(keys), len(self._staging)):
            yield slice(first, first + len(self._staging))

    def _parts(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(values, [piece.shape[1] for piece in self._pieces], dim=1)


def done(result: T) -> Future[T]:
    """Return a future that has this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _pinned(num_blocks: int, block_bytes: int) -> torch.Tensor:
    return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
