"""The lane: decode and extend through rings in shared memory, served by a thread of the daemon of its own."""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvservice import _ext
from kvservice.client.requests import build
from kvservice.client.shared_memory import Place, fetch
from kvservice.client.transports import (
    ALIGNMENT,
    Layer,
    RegionTransport,
    Staging,
    TransportName,
    check_shapes,
    given,
    staged_bytes,
)
from kvservice.errors import ConnectionLostError
from kvservice.v1 import host_pb2
from kvservice.wire.status import from_reason
from kvservice.wire.tensors import Array

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore
    from kvservice.client.step import StepCore

# For how long a client spins for an answer before it sleeps.
SPIN_US = 50.0
# How long the asynchronous face holds its event loop for an answer before it leaves the waiting to a thread.
HERE_S = 100e-6
# How often one that waits looks whether the daemon is still there.
LOOK_S = 0.25

Entry = tuple[int, int]


class LaneTransport:
    """Tensors in regions that the daemon has made are not copied; others are, into one and out of it."""

    name: TransportName = "lane"

    def __init__(self, session: SessionCore[Any], lane: _ext.LaneClient) -> None:
        self._session = session
        self._lane = lane
        self._staging = Staging(session)
        self._lock = session.stream.lock()
        # The call whose answer nobody has taken: its caller was interrupted, but its tensors are still in use.
        self._unanswered: int | None = None
        # What a lane does not carry.
        self._region = RegionTransport(session)

    @staticmethod
    async def open(session: SessionCore[Any]) -> LaneTransport:
        """Raises what OpenLane does, and ConnectionLostError where the descriptor is not to be had."""
        response = await session.call(
            "open_lane", build(host_pb2.OpenLaneRequest, request_id=session.next_request_id())
        )
        (descriptor,) = await fetch(session, response.handover_token, 1)
        try:
            memory = mmap.mmap(descriptor, _ext.LANE_BYTES)
        finally:
            os.close(descriptor)
        return LaneTransport(session, _ext.LaneClient(memory, SPIN_US))

    async def attend(self, layer: Layer) -> tuple[Array, Array | None]:
        if not self._carries(layer):
            return await self._region.attend(layer)
        async with self._lock:
            if self._unanswered is not None:
                await self._answer()
            slopes = None if layer.options.alibi_slopes is None else np.array(layer.options.alibi_slopes, np.float32)
            num_bytes = staged_bytes(layer) + (0 if slopes is None else slopes.nbytes + ALIGNMENT)
            await self._staging.reserve(num_bytes)
            query, key, value = (self._input(array) for array in (layer.query, layer.key, layer.value))
            output, output_place = self._result(layer.out, layer.query.shape, layer.query.dtype)
            lse, lse_place = None, None
            if layer.return_lse:
                lse, lse_place = self._result(layer.lse_out, layer.lse_shape, np.float32)
            slopes_place = None if slopes is None else self._input(slopes)
            self._unanswered = self._submit(layer, (query, key, value, output_place, lse_place), slopes_place)
            reason, field, message = await self._answer()
            if reason:
                raise from_reason(reason, message, field)
            return given(output, layer.out), None if lse is None else given(lse, layer.lse_out)

    def _carries(self, layer: Layer) -> bool:
        """What the daemon will refuse goes by the stream, which says more of it."""
        return layer.options.block_sparse is None or self._session.info.device != "cpu"

    def _submit(self, layer: Layer, places: tuple[Entry, Entry, Entry, Entry, Entry | None], slopes: Any) -> int:
        check_shapes(self._session.info, layer)
        options, sparse = layer.options, layer.options.block_sparse
        return self._lane.submit(
            layer.step.step_id,
            layer.number,
            layer.decode,
            layer.query.shape[1],
            *places,
            scale=options.scale,
            sliding_window=options.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=slopes,
            block_sparse=None
            if sparse is None
            else (
                sparse.vert_stride,
                sparse.local_blocks,
                sparse.block_size,
                sparse.head_sliding_step,
                sparse.tp_rank,
            ),
        )

    async def _answer(self) -> tuple[str, str, str]:
        """Reason, field and message; no reason where the call was done."""
        assert self._unanswered is not None, "a call was made"
        number = self._unanswered
        answer = self._lane.wait(number, HERE_S)
        broken_at: float | None = None
        while answer is None:
            if self._session.stream.broken:
                # A stream breaks and is mended while the daemon lives; if it does not, no answer comes.
                broken_at = broken_at or time.monotonic()
                if time.monotonic() - broken_at > 2 * LOOK_S:
                    raise ConnectionLostError("the daemon is gone, or has closed the session")
            answer = await self._session.stream.run(self._lane.wait, number, LOOK_S)
        self._unanswered = None
        return answer

    def _input(self, array: Array) -> Entry:
        place = self._made(array)
        if place is None:
            copy, place = self._staging.place(array.shape, array.dtype)
            np.copyto(copy, array)
        return _entry(place)

    def _result(self, wanted: Array | None, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Entry]:
        place = None if wanted is None else self._made(wanted)
        if wanted is not None and place is not None:
            return wanted, _entry(place)
        array, place = self._staging.place(shape, dtype)
        return array, _entry(place)

    def _made(self, array: Array) -> Place | None:
        """Where an array lies, if lanes take it."""
        place = self._session.find_place(array)
        return place if place is not None and place.memory.number is not None and place.offset % 16 == 0 else None

    async def write(self, step: StepCore, number: int | None, key: Array, value: Array) -> None:
        await self._region.write(step, number, key, value)

    async def close(self) -> None:
        pass  # with the session


def _entry(place: Place) -> Entry:
    assert place.memory.number is not None, "lanes take it"
    return place.memory.number, place.offset
