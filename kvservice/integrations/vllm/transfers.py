"""Copies between the blocks of vLLM and the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvservice.client import Scatter
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.vllm.layout import BlockLayout

Flags = npt.NDArray[np.bool_]


class BlockCopier(Protocol):
    """Copies blocks of vLLM to and from a store of the client. Both calls return after the last access to memory."""

    def mark(self) -> Any:
        """Return what `put` waits for: the computations that are queued now."""

    def get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int]) -> Flags:
        """Fill blocks. Returns which of them are right."""

    def put(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> npt.NDArray[Any]:
        """Store blocks. Returns the PutStatus of each."""


def block_copier(layout: BlockLayout, max_blocks: int, *, verify: bool = False) -> BlockCopier:
    """`max_blocks`: the most blocks of one call; `verify`: a block whose checksum is wrong is not right. Raises
    InvalidArgumentError for a device that is not supported."""
    kinds = {memory.device.type for memory in layout.memories}
    if kinds == {"cpu"}:
        return HostCopier(layout, verify=verify)
    if kinds == {"cuda"}:
        return StagedCopier(layout, max_blocks, verify=verify)
    raise InvalidArgumentError(f"K/V caches on {', '.join(sorted(kinds))} are not supported", field="kv_caches")


class HostCopier:
    """Copies between the store and blocks in host memory, without a copy in between."""

    def __init__(self, layout: BlockLayout, *, verify: bool) -> None:
        self._layout, self._verify = layout, verify
        self._starts = np.array(layout.starts, np.int64)
        self._strides = np.array(layout.strides, np.int64)

    def mark(self) -> None:
        return None

    def get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int]) -> Flags:
        found: Flags = store.get(keys, self._places(block_ids), verify=self._verify)
        return found

    def put(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: Any) -> npt.NDArray[Any]:  # noqa: ARG002
        statuses: npt.NDArray[Any] = store.put(keys, self._places(block_ids))
        return statuses

    def _places(self, block_ids: Sequence[int]) -> Scatter:
        offsets = self._starts + np.asarray(block_ids, np.int64)[:, None] * self._strides
        return Scatter(self._layout.memories, offsets, self._layout.piece_bytes)


class StagedCopier:
    """Copies blocks of a GPU through pinned host memory, on a stream of its own."""

    def __init__(self, layout: BlockLayout, max_blocks: int, *, verify: bool) -> None:
        self._verify = verify
        self._pieces = [
            memory.as_strided((layout.num_blocks, num_bytes), (stride, 1), start)
            for memory, start, stride, num_bytes in zip(
                layout.memories, layout.starts, layout.strides, layout.piece_bytes, strict=True
            )
        ]
        self._device = layout.memories[0].device
        self._staging = _pinned(max_blocks, layout.block_bytes)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def get(self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int]) -> Flags:
        found: Flags = store.get(keys, self._staging[: len(keys)], verify=self._verify)
        with torch.cuda.stream(self._stream):
            staged = self._staging[: len(keys)].to(self._device, non_blocking=True)
            right = torch.from_numpy(found).to(self._device)
            blocks = torch.tensor(block_ids, device=self._device)[right]
            for piece, part in zip(self._pieces, self._parts(staged[right]), strict=True):
                piece[blocks] = part
        self._stream.synchronize()
        return found

    def put(
        self, store: Any, keys: Sequence[bytes], block_ids: Sequence[int], mark: torch.cuda.Event
    ) -> npt.NDArray[Any]:
        staging = self._staging[: len(keys)]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            blocks = torch.tensor(block_ids, device=self._device)
            staging.copy_(torch.cat([piece[blocks] for piece in self._pieces], dim=1), non_blocking=True)
        self._stream.synchronize()
        statuses: npt.NDArray[Any] = store.put(keys, staging)
        return statuses

    def _parts(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(values, [piece.shape[1] for piece in self._pieces], dim=1)


def _pinned(num_blocks: int, block_bytes: int) -> torch.Tensor:
    return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
