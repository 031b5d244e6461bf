"""The lane transport: decode and extend through shared-memory rings, each lane served by its own daemon thread."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvservice import _ext
from kvservice.client.gpu import device_of, finish_stream
from kvservice.client.requests import build
from kvservice.client.shared_memory import Place, fetch, introduce_once
from kvservice.client.tensors import Tensor, is_on_gpu
from kvservice.client.transports import (
    ALIGNMENT,
    DEFAULT_OPTIONS,
    Layer,
    RegionTransport,
    Staging,
    TransportName,
    attend,
    check_layer,
    given,
    staged_bytes,
    write,
)
from kvservice.errors import ConnectionLostError, DaemonAwayError, UnknownStepError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import host_pb2
from kvservice.wire.status import from_reason

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore
    from kvservice.client.step import StepCore

# How long a client spins for an answer before it sleeps. With a CPU pool, spinning takes CPU time from the kernels.
SPIN_US = {"cpu": 50.0, "cuda": 1000.0}
# How long the async API blocks its event loop for an answer before a thread waits instead.
HERE_S = 100e-6
# How often a waiting call checks that the daemon is alive.
LOOK_S = 0.25

Entry = tuple[int, int]


class Placed(NamedTuple):
    """The places of a call's tensors as the native lane client takes them, (region number, offset in bytes) each, and
    the result tensors in the regions."""

    query: Entry
    key: Entry
    value: Entry
    output_place: Entry
    lse_place: Entry | None
    alibi_slopes: Entry | None
    output: Tensor
    lse: Tensor | None


class _LaneClosedError(ConnectionLostError):
    """The daemon has closed the lane. The call was not sent."""


class LaneTransport:
    """The lane transport. Tensors in regions that lanes support are passed in place. Others are copied through a
    staging region."""

    name: TransportName = "lane"
    takes_gpu_tensors: bool

    def __init__(self, session: SessionCore[Any], lane: _ext.LaneClient) -> None:
        self._session = session
        self._lane = lane
        device = device_of(session.info)
        self.takes_gpu_tensors = device is not None
        self._staging = Staging(session)
        self._gpu_staging = Staging(session, device)
        self._lock = session.stream.lock()
        # The number of a call whose answer was not received because its caller was interrupted. The daemon may still
        # use its tensors.
        self._unanswered: int | None = None
        # The version of the session's regions that the native client has.
        self._places_version = -1
        # The transport for calls that lanes do not support.
        self._region = RegionTransport(session)

    @staticmethod
    async def open(session: SessionCore[Any]) -> LaneTransport:
        """Open a lane. Raises the errors of OpenLane, and ConnectionLostError if the descriptor cannot be fetched."""
        return LaneTransport(session, await _open_lane(session))

    async def _reopen(self, closed: _ext.LaneClient) -> None:
        """Open a new lane in place of `closed`. The daemon closes the lane and the regions of a session that has had no
        stream for its grace period."""
        async with self._lock:
            if self._lane is closed:
                await self._session.unregister_region()
                self._lane = await _open_lane(self._session)
                self._unanswered, self._places_version = None, -1

    async def attend(self, layer: Layer) -> tuple[Tensor, Tensor | None]:
        if not self._carries(layer):
            return await attend(self._region, layer)
        check_layer(self._session.info, layer)
        lane = self._lane
        try:
            return await self._attend(layer)
        except _LaneClosedError:
            await self._reopen(lane)
            return await self._attend(layer)

    async def _attend(self, layer: Layer) -> tuple[Tensor, Tensor | None]:
        deadline = self._session.stream.deadline(layer.timeout_s)
        async with self._lock:
            await self._settle(deadline)
            placed = self._placed(layer)
            if placed is None:
                placed = await self._staged(layer)
            if layer.on_gpu:
                # The daemon's stream does not wait for streams of other processes: it would hang forever if such a
                # process were killed. So the inputs must be complete before the call is sent.
                await self._session.stream.run(finish_stream, layer.query)
            self._unanswered = self._submit(layer, placed)
            reason, field, message = await self._answer(deadline)
            if not reason:
                lse = None if placed.lse is None else given(placed.lse, layer.lse_out)
                return given(placed.output, layer.out), lse
        error = from_reason(reason, message, field)
        if isinstance(error, UnknownStepError):
            # Either the daemon had no memory to pass the step's tables to the lane, or the step does not exist. The
            # stream decides.
            return await attend(self._region, layer)
        raise error

    async def attend_in_place(
        self, step: StepCore, decode: bool, number: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> bool:
        """See Transport."""
        async with self._lock:
            if self._unanswered is not None:
                return False
            if self._places_version != self._session.regions_version:
                self._set_places()
            if self.takes_gpu_tensors and is_on_gpu(query):
                await self._session.stream.run(finish_stream, query)
            submit = self._lane.submit_in_place
            try:
                self._unanswered = submit(step.step_id, step.num_tokens, number, decode, query, key, value, out)
            except ConnectionLostError:
                return False
            return self._unanswered is not None and not (await self._answer(self._session.stream.deadline()))[0]

    async def _settle(self, deadline: float | None) -> None:
        """Receive the answer of an interrupted call, if there is one, before the next call is sent."""
        if self._unanswered is not None:
            try:
                await self._answer(deadline)
            except DaemonAwayError:
                raise
            except ConnectionLostError as error:
                raise _LaneClosedError(str(error)) from None

    def _set_places(self) -> None:
        info, version = self._session.info, self._session.regions_version
        regions = [(memory.number, memory.address, memory.num_bytes) for memory in self._session.lane_regions()]
        self._lane.set_places(regions, info.num_kv_heads, info.head_size, TENSOR_DTYPES[info.dtype])
        self._places_version = version

    def _carries(self, layer: Layer) -> bool:
        """Return whether the lane supports this call. Other calls use the stream, whose errors say more."""
        return layer.options.block_sparse is None or self._session.info.device != "cpu"

    def _placed(self, layer: Layer) -> Placed | None:
        """Return the places of the tensors if no copy is needed, else None."""
        if layer.out is None or layer.return_lse or layer.options.alibi_slopes is not None:
            return None
        query, key, value = self._made(layer.query), self._made(layer.key), self._made(layer.value)
        output = self._made(layer.out)
        if query is None or key is None or value is None or output is None:
            return None
        return Placed(query, key, value, output, None, None, layer.out, None)

    async def _staged(self, layer: Layer) -> Placed:
        """Copy the inputs that are not in a region into the staging region, and reserve room for the results."""
        staging = self._gpu_staging if layer.on_gpu else self._staging
        slopes = None if layer.options.alibi_slopes is None else np.array(layer.options.alibi_slopes, np.float32)
        await staging.reserve(staged_bytes(layer) + (0 if slopes is None else slopes.nbytes + ALIGNMENT))
        query, key, value = (self._input(staging, tensor) for tensor in (layer.query, layer.key, layer.value))
        output, output_place = self._result(staging, layer.out, tuple(layer.query.shape), self._session.info.dtype)
        lse, lse_place = None, None
        if layer.return_lse:
            lse, lse_place = self._result(staging, layer.lse_out, layer.lse_shape, "float32")
        slopes_place = None if slopes is None else self._input(staging, slopes)
        return Placed(query, key, value, output_place, lse_place, slopes_place, output, lse)

    def _submit(self, layer: Layer, placed: Placed) -> int:
        try:
            return self._send(layer, placed)
        except ConnectionLostError as error:
            raise _LaneClosedError(str(error)) from None

    def _send(self, layer: Layer, placed: Placed) -> int:
        options, sparse = layer.options, layer.options.block_sparse
        call = layer.step.step_id, layer.number, layer.decode, int(layer.query.shape[1]), *placed[:5]
        if options is DEFAULT_OPTIONS:
            return self._lane.submit(*call)
        return self._lane.submit(
            *call,
            scale=options.scale,
            sliding_window=options.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=placed.alibi_slopes,
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

    async def _answer(self, deadline: float | None) -> tuple[str, str, str]:
        """Wait for the answer: reason, field and message of an error; an empty reason means success. Raises the errors
        of `Stream.check`."""
        assert self._unanswered is not None, "a call was made"
        number = self._unanswered
        stream = self._session.stream
        answer = self._lane.wait(number, HERE_S)
        while answer is None:
            stream.check(deadline)
            answer = await stream.run(self._lane.wait, number, stream.left_s(deadline, LOOK_S))
        self._unanswered = None
        return answer

    def _input(self, staging: Staging, tensor: Tensor) -> Entry:
        entry = self._made(tensor)
        return _entry(staging.put(tensor)[1]) if entry is None else entry

    def _result(
        self, staging: Staging, wanted: Tensor | None, shape: tuple[int, ...], dtype: str
    ) -> tuple[Tensor, Entry]:
        entry = None if wanted is None else self._made(wanted)
        if wanted is not None and entry is not None:
            return wanted, entry
        tensor, place = staging.place(shape, dtype)
        return tensor, _entry(place)

    def _made(self, tensor: Tensor) -> Entry | None:
        """Return the place of a tensor, or None if lanes do not support it: it is not in a region with a number, or not
        aligned to 16 bytes."""
        place = self._session.find_place(tensor)
        return None if place is None or place.memory.number is None or place.offset % 16 else _entry(place)

    async def write(
        self, step: StepCore, number: int | None, key: Tensor, value: Tensor, timeout_s: float | None = None
    ) -> None:
        await write(self._region, step, number, key, value, timeout_s)

    async def close(self) -> None:
        pass  # the daemon closes the lane with the session


async def _open_lane(session: SessionCore[Any]) -> _ext.LaneClient:
    await introduce_once(session)
    response = await session.call("open_lane", build(host_pb2.OpenLaneRequest, request_id=session.next_request_id()))
    (descriptor,) = await fetch(session, response.handover_token, 1)
    try:
        memory = mmap.mmap(descriptor, _ext.LANE_BYTES)
    finally:
        os.close(descriptor)
    kind, _, _ = session.info.device.partition(":")
    return _ext.LaneClient(memory, SPIN_US[kind])


def _entry(place: Place) -> Entry:
    assert place.memory.number is not None, "lanes take it"
    return place.memory.number, place.offset
