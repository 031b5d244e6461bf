"""The lane transport: decode and extend through shared-memory rings, each lane served by its own daemon thread."""

from __future__ import annotations

import mmap
import os
from dataclasses import astuple
from typing import Any, NamedTuple

from kvservice import _ext
from kvservice.attention_options import DEFAULT_OPTIONS
from kvservice.client.messages import build
from kvservice.client.regions import ALIGNMENT, RegionRange, SharedRegion, Staging
from kvservice.client.remote import Context
from kvservice.client.step import (
    AttentionCall,
    AttentionResult,
    SharedMemoryLostError,
    Transport,
    TransportName,
    WriteCall,
    check_attention,
    given,
)
from kvservice.client.tensors import (
    Tensor,
    copy,
    copy_of,
    finish_stream,
    is_on_gpu,
    is_plain_on_host,
    like,
    pool_device,
)
from kvservice.client.transports.region import RegionTransport
from kvservice.errors import ConnectionLostError, DaemonAwayError, DrainingError, InvalidArgumentError, UnknownStepError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import host_pb2
from kvservice.wire.status import from_reason

# How long a client spins for an answer before it sleeps. With a CPU pool, spinning takes CPU time from the kernels.
SPIN_US = {"cpu": 50.0, "cuda": 1000.0}
# How long the async API blocks its event loop for an answer before a thread waits instead.
HERE_S = 100e-6
# The shapes of calls whose tensors in the staging region are remembered.
MAX_COPIES = 16
# How often a waiting call checks that the daemon is alive.
LOOK_S = 0.25

LanePlace = tuple[int, int]
# Reason, field and message of an error; an empty reason means success.
Answer = tuple[str, str, str]


class Placed(NamedTuple):
    """The places of a call's tensors as the native lane client takes them, (region number, offset in bytes) each, and
    the result tensors in the regions."""

    query: LanePlace
    key: LanePlace
    value: LanePlace
    output_place: LanePlace
    lse_place: LanePlace | None
    alibi_slopes: LanePlace | None
    output: Tensor
    lse: Tensor | None


class StagedCopies(NamedTuple):
    """Tensors in the staging region with the shapes of an earlier call. A call of the same shapes is sent in place
    after its tensors were copied there: to find places for each call takes longer than a short call. Tensors of several
    shapes lie over each other, because one call uses the region at a time."""

    region: SharedRegion
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor


class LaneTransport(Transport):
    """See Transport. Tensors in regions that lanes support are passed in place. Others are copied through a staging
    region."""

    name: TransportName = "lane"

    def __init__(self, context: Context, lane: _ext.LaneClient, num_restarts: int) -> None:
        super().__init__(context)
        self._lane = lane
        self._is_lost = False  # whether the daemon has closed the lane
        # The number of restarts of the daemon when the lane was opened.
        self._num_restarts = num_restarts
        device = pool_device(context.info)
        self.takes_gpu_tensors = device is not None
        self._staging = Staging(context.regions)
        self._gpu_staging = Staging(context.regions, device)
        self._lock = context.connection.lock()
        # The number of the call that was sent. It stays set if its caller was interrupted: the daemon may still use its
        # tensors. `_received` is its answer, which a thread may receive for a caller that was interrupted.
        self._unanswered: int | None = None
        self._received: Answer | None = None
        self._copies: dict[tuple[Any, ...], StagedCopies] = {}  # by shapes
        # The version of the session's regions that the native client has.
        self._places_version = -1
        # The transport for calls that lanes do not support.
        self._rest = RegionTransport(context)

    @staticmethod
    async def open(context: Context) -> LaneTransport:
        """Open a lane. Raises the errors of OpenLane, and ConnectionLostError if the descriptor cannot be fetched."""
        return await context.connection.with_one_process(lambda: LaneTransport._open(context))

    @staticmethod
    async def _open(context: Context) -> LaneTransport:
        num_restarts = context.connection.num_restarts
        return LaneTransport(context, await open_lane(context), num_restarts)

    async def reopen(self) -> None:
        async with self._lock:
            num_restarts = self.context.connection.num_restarts
            if self._is_lost or self._num_restarts != num_restarts:
                await self.context.fds.introduce_once()
                await self.context.regions.unregister()
                self._lane = await open_lane(self.context, again=True)
                self._unanswered = self._received = None
                self._places_version, self._is_lost, self._num_restarts = -1, False, num_restarts

    async def attend(self, call: AttentionCall) -> AttentionResult:
        if not call.has_defaults:
            return await super().attend(call)
        output, answer = call.out, None
        async with self._lock:
            if self._unanswered is not None:
                await self._receive_interrupted(call.deadline)
            sent = await self._copied(call) if output is None else call
            if sent is not None:
                if self.takes_gpu_tensors and is_on_gpu(sent.query):
                    await self.context.connection.run(finish_stream, sent.query)
                self._unanswered = self._submit_in_place(sent)
                if self._unanswered is not None:
                    answer = await self._answer(call.deadline)
                    output = sent.out if sent is call else copy_of(sent.out)
        if answer is None:  # a tensor is not in a region, or invalid
            return await super().attend(call)
        return await self._refused(call, answer) if answer[0] else (output, None)

    async def _copied(self, call: AttentionCall) -> AttentionCall | None:
        """Copy the tensors to the staging region and return the call with the copies, which has `out`. None: a tensor
        is not in host memory, or not of the pool's dtype."""
        query, key, value = call.query, call.key, call.value
        dtype = self.context.info.dtype
        for tensor in (query, key, value):
            if not is_plain_on_host(tensor, dtype):
                return None
        shapes = query.shape, key.shape, value.shape, type(query)
        copies = self._copies.get(shapes)
        if copies is None or copies.region is not self._staging.region:
            copies = await self._reserve_copies(call, shapes)
        copy(copies.query, query)
        copy(copies.key, key)
        copy(copies.value, value)
        return call._replace(query=copies.query, key=copies.key, value=copies.value, out=copies.out)

    async def _reserve_copies(self, call: AttentionCall, shapes: tuple[Any, ...]) -> StagedCopies:
        staging, dtype = self._staging, self.context.info.dtype
        await staging.reserve(call.staging_bytes, call.deadline)
        assert staging.region is not None, "room was reserved"
        like_query = (like(staging.place(tuple(shape), dtype)[0], call.query) for shape in (*shapes[:3], shapes[0]))
        if any(one.region is not staging.region for one in self._copies.values()) or len(self._copies) == MAX_COPIES:
            self._copies.clear()
        copies = self._copies[shapes] = StagedCopies(staging.region, *like_query)
        return copies

    def _submit_in_place(self, call: AttentionCall) -> int | None:
        """Send a plain call whose tensors are all in regions, and return its number. None: the native client, which
        checks the tensors, has sent nothing."""
        if self._places_version != self.context.regions.version:
            self._set_places()
        step, submit = call.step, self._lane.submit_in_place
        try:
            return submit(
                step.step_id, step.num_tokens, call.layer, call.decode, call.query, call.key, call.value, call.out
            )
        except ConnectionLostError as error:
            raise self._lost(error) from None

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        if not self._carries(call):
            return await self._rest.attend(call)
        check_attention(self.context.info, call)
        async with self._lock:
            if self._unanswered is not None:
                await self._receive_interrupted(call.deadline)
            placed = self._placed(call)
            if placed is None:
                placed = await self._staged(call)
            if call.on_gpu:
                # The daemon's stream does not wait for streams of other processes: it would hang forever if such a
                # process were killed. So the inputs must be complete before the call is sent.
                await self.context.connection.run(finish_stream, call.query)
            self._unanswered = self._submit(call, placed)
            answer = await self._answer(call.deadline)
            if not answer[0]:
                lse = None if placed.lse is None else given(placed.lse, call.lse_out)
                return given(placed.output, call.out), lse
        return await self._refused(call, answer)

    async def _refused(self, call: AttentionCall, answer: Answer) -> AttentionResult:
        """Raise the error of an answer. Without the step, the region transport executes the call: either the daemon had
        no memory to pass the step's tables to the lane, or the step does not exist. It does so too if the daemon is
        about to stop: its connection waits for a process that takes over."""
        reason, field, message = answer
        error = from_reason(reason, message, field)
        if isinstance(error, (UnknownStepError, DrainingError)):
            return await self._rest.attend(call)
        raise error

    def _lost(self, error: ConnectionLostError) -> SharedMemoryLostError:
        self._is_lost = True
        return SharedMemoryLostError(str(error))

    async def _receive_interrupted(self, deadline: float | None) -> None:
        """Receive the answer of an interrupted call, before the next call is sent."""
        try:
            await self._answer(deadline)
        except InvalidArgumentError:
            self._unanswered = None  # the call was interrupted when it had just received the answer
        except DaemonAwayError:
            raise
        except ConnectionLostError as error:
            raise self._lost(error) from None

    def _set_places(self) -> None:
        info, regions = self.context.info, self.context.regions
        version = regions.version
        places = [(region.number, region.address, region.num_bytes) for region in regions.numbered()]
        self._lane.set_places(places, info.num_kv_heads, info.head_size, TENSOR_DTYPES[info.dtype])
        self._places_version = version

    def _carries(self, call: AttentionCall) -> bool:
        """Return whether the lane supports this call. Other calls use the stream, whose errors say more."""
        return call.options.block_sparse is None or self.context.info.device != "cpu"

    def _placed(self, call: AttentionCall) -> Placed | None:
        """Return the places of the tensors if no copy is needed, else None."""
        if call.out is None or call.return_lse or call.options.alibi_slopes is not None:
            return None
        query, key, value = self._place(call.query), self._place(call.key), self._place(call.value)
        output = self._place(call.out)
        if query is None or key is None or value is None or output is None:
            return None
        return Placed(query, key, value, output, None, None, call.out, None)

    async def _staged(self, call: AttentionCall) -> Placed:
        """Copy the inputs that are not in a region into the staging region, and reserve room for the results."""
        staging = self._gpu_staging if call.on_gpu else self._staging
        slopes = call.options.alibi_slopes
        num_bytes = call.staging_bytes + (0 if slopes is None else slopes.nbytes + ALIGNMENT)
        await staging.reserve(num_bytes, call.deadline)
        query, key, value = (self._input(staging, tensor) for tensor in (call.query, call.key, call.value))
        output, output_place = self._result(staging, call.out, tuple(call.query.shape), self.context.info.dtype)
        lse, lse_place = None, None
        if call.return_lse:
            lse, lse_place = self._result(staging, call.lse_out, call.lse_shape, "float32")
        slopes_place = None if slopes is None else self._input(staging, slopes)
        return Placed(query, key, value, output_place, lse_place, slopes_place, output, lse)

    def _submit(self, call: AttentionCall, placed: Placed) -> int:
        try:
            return self._send(call, placed)
        except ConnectionLostError as error:
            raise self._lost(error) from None

    def _send(self, call: AttentionCall, placed: Placed) -> int:
        options, sparse = call.options, call.options.block_sparse
        arguments = call.step.step_id, call.layer, call.decode, int(call.query.shape[1]), *placed[:5]
        if options is DEFAULT_OPTIONS:
            return self._lane.submit(*arguments)
        return self._lane.submit(
            *arguments,
            scale=options.scale or 0.0,
            sliding_window=options.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=placed.alibi_slopes,
            block_sparse=None if sparse is None else astuple(sparse),
        )

    async def _answer(self, deadline: float | None) -> Answer:
        """Wait for the answer. Raises the errors of `SessionConnection.check`; SharedMemoryLostError if the daemon has
        closed the lane before the call's turn; ConnectionLostError if the daemon ended and may have executed it."""
        connection = self.context.connection
        self._receive(HERE_S)
        while self._received is None:
            connection.check(deadline)
            if self._num_restarts != connection.num_restarts:
                raise ConnectionLostError("the daemon was restarted before it answered the call")
            await connection.run(self._receive, connection.left_s(deadline, LOOK_S))
        answer, self._received, self._unanswered = self._received, None, None
        return answer

    def _receive(self, timeout_s: float) -> None:
        """Wait for the answer of the call that was sent. The lane gives it out only once, so it is kept even if the
        caller is interrupted meanwhile."""
        assert self._unanswered is not None, "a call was made"
        if self._received is None:
            try:
                self._received = self._lane.wait(self._unanswered, timeout_s)
            except ConnectionLostError as error:
                raise self._lost(error) from None

    def _input(self, staging: Staging, tensor: Tensor) -> LanePlace:
        place = self._place(tensor)
        return _lane_place(staging.put(tensor)[1]) if place is None else place

    def _result(
        self, staging: Staging, wanted: Tensor | None, shape: tuple[int, ...], dtype: str
    ) -> tuple[Tensor, LanePlace]:
        place = None if wanted is None else self._place(wanted)
        if wanted is not None and place is not None:
            return wanted, place
        tensor, staged = staging.place(shape, dtype)
        return tensor, _lane_place(staged)

    def _place(self, tensor: Tensor) -> LanePlace | None:
        """Return the place of a tensor, or None if lanes do not support it: it is not in a region with a number, or not
        aligned to 16 bytes."""
        place = self.context.regions.find(tensor)
        return None if place is None or place.region.number is None or place.offset % 16 else _lane_place(place)

    async def write_prepared(self, call: WriteCall) -> None:
        await self._rest.write(call)


async def open_lane(context: Context, *, again: bool = False) -> _ext.LaneClient:
    """Open the session's lane. The daemon closes it with the session, or before it opens another one."""
    await context.fds.introduce_once()
    connection = context.connection
    if again or connection.num_restarts:  # the daemon may have opened one for an attempt that got no answer
        await connection.call("close_lane", build(host_pb2.CloseLaneRequest, request_id=connection.next_request_id()))
    request = build(host_pb2.OpenLaneRequest, request_id=connection.next_request_id())
    response = await connection.call("open_lane", request)
    (descriptor,) = await context.fds.fetch(response.handover_token, 1)
    try:
        memory = mmap.mmap(descriptor, _ext.LANE_BYTES)
    finally:
        os.close(descriptor)
    kind, _, _ = context.info.device.partition(":")
    return _ext.LaneClient(memory, SPIN_US[kind])


def _lane_place(place: RegionRange) -> LanePlace:
    assert place.region.number is not None, "lanes take it"
    return place.region.number, place.offset
