"""The handlers of AttentionService, and their codec: they move the bytes of tensors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import numpy as np

from kvservice import _ext
from kvservice.attention_options import DEFAULT_OPTIONS, AttentionOptions, BlockSparse
from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, TransferFailedError
from kvservice.server.calls.handlers import (
    AnyHandler,
    WhileDraining,
    in_session,
    max_response_bytes,
    response_too_large,
)
from kvservice.server.loop import Caller, despite_leaving, to_the_end
from kvservice.server.memory.region import Array, Place
from kvservice.server.memory.regions import Target
from kvservice.server.memory.remote import RemoteMemory
from kvservice.server.sessions.session import ServerSession
from kvservice.v1 import (
    attention_pb2,
    tensor_pb2,
)
from kvservice.wire.tensors import Array as Tensor
from kvservice.wire.tensors import Encoded, encode_tensor, put_type, to_array

TENSORS_TOO_LARGE = "a call's tensors may not be larger than a message"


class AttentionCalls:
    """The responses with tensors are already encoded."""

    def __init__(self, config: ServeConfig, engine: CacheEngine) -> None:
        self._engine = engine
        self._max_request_bytes = config.max_message_bytes
        self._max_response_bytes = max_response_bytes(config)

    def handlers(self) -> tuple[AnyHandler, ...]:
        begun_steps = WhileDraining.FOR_BEGUN_STEPS
        return (
            in_session("decode", attention_pb2.AttendRequest, self.decode, begun_steps),
            in_session("extend", attention_pb2.AttendRequest, self.extend, begun_steps),
            in_session("write", attention_pb2.WriteRequest, self.write, begun_steps),
            in_session("read", attention_pb2.ReadRequest, self.read),
        )

    async def decode(self, session: ServerSession, request: attention_pb2.AttendRequest) -> Encoded:
        """Do as `extend`, for a step with one token of each sequence."""
        step = session.namespace.steps.get(request.step_id)
        if step is not None and len(step.plan.slot_mapping) != len(step.plan.query_lens):
            raise InvalidArgumentError("a sequence has several tokens in this step: use Extend", field="step_id")
        return await self.extend(session, request)

    async def extend(self, session: ServerSession, request: attention_pb2.AttendRequest) -> Encoded:
        """Return an encoded AttendResponse."""
        options = attention_options(request.options) if request.HasField("options") else DEFAULT_OPTIONS
        if request.HasField("lse_place") and not request.return_lse:
            raise InvalidArgumentError("there is no log-sum-exp without return_lse", field="lse_place")
        query, key, value = self._arrays(session, query=request.query, key=request.key, value=request.value)
        if not (request.HasField("output_place") or request.HasField("lse_place")):
            return await self._attend(session, request, (query, key, value), options)
        with contextlib.ExitStack() as in_use:
            output_target = lse_target = None
            if request.HasField("output_place"):
                target = session.regions.target(place_of(request.output_place), "output_place")
                output_target = in_use.enter_context(target)
                output_target.check_size(query.nbytes)
            if request.HasField("lse_place"):
                lse_target = in_use.enter_context(session.regions.target(place_of(request.lse_place), "lse_place"))
                if query.ndim == 3:
                    lse_target.check_size(query.shape[0] * query.shape[1] * 4)
            return await self._attend(session, request, (query, key, value), options, output_target, lse_target)

    async def _attend(
        self,
        session: ServerSession,
        request: attention_pb2.AttendRequest,
        tensors: tuple[Array, Array, Array],
        options: AttentionOptions,
        output_target: Target | None = None,
        lse_target: Target | None = None,
    ) -> Encoded:
        """Attend with the tensors of a request. The results go to the targets, and the others to the response."""
        out = None
        if output_target is not None:
            out = output_target.view_for(*tensors)
        # The output is as large as the query, and the log-sum-exp adds at most an eighth.
        elif (num_bytes := tensors[0].nbytes * 9 // 8) > self._max_response_bytes:
            raise response_too_large(num_bytes, self._max_response_bytes, "query")
        part = request.first_token, request.num_tokens
        output, lse = await self._engine.attend(
            session.namespace, request.step_id, request.layer, *tensors, options, request.return_lse, out, part
        )
        kind = attention_pb2.AttendResponse
        encoded = encode_tensor(output) if output_target is None else place_output(output, output_target)
        response = encoded.inside(kind.OUTPUT_FIELD_NUMBER)
        if lse is not None:
            encoded = encode_tensor(lse) if lse_target is None else place_output(lse, lse_target)
            response += encoded.inside(kind.LSE_FIELD_NUMBER)
        return response

    async def write(self, session: ServerSession, request: attention_pb2.WriteRequest) -> attention_pb2.WriteResponse:
        if session.regions.is_remote(request.key.shared_memory.region):
            await despite_leaving(functools.partial(self._write_remote, session, request))
        else:
            key, value = self._arrays(session, key=request.key, value=request.value)
            inline = [
                array.nbytes
                for array, tensor in ((key, request.key), (value, request.value))
                if not tensor.HasField("shared_memory")
            ]
            session.shared.transfers.travelled_in_messages(sum(inline))
            await self._write(session, request, key, value)
        return attention_pb2.WriteResponse()

    async def _write(
        self, session: ServerSession, request: attention_pb2.WriteRequest, key: Array, value: Array
    ) -> None:
        part = (request.first_token, request.num_tokens)
        layer = optional_layer(request)
        await self._engine.write(session.namespace, request.step_id, layer, key, value, part)

    async def _write_remote(self, session: ServerSession, request: attention_pb2.WriteRequest, caller: Caller) -> None:
        places = source_places(request)
        num_bytes = sum(place.byte_size for place in places.values())
        if num_bytes > self._max_request_bytes:
            raise InvalidArgumentError(TENSORS_TOO_LARGE, field="value.shared_memory.byte_size")
        with session.regions.remote(places) as memory:
            async with memory.lock:
                arrived_damaged = session.shared.transfers.arrived_damaged
                _check_waits(caller)
                key, value = await pull_tensors(memory, request, places, arrived_damaged)
                _check_waits(caller)
                session.begin_call()
                await self._write(session, request, key, value)

    async def read(
        self, session: ServerSession, request: attention_pb2.ReadRequest
    ) -> attention_pb2.ReadResponse | Encoded:
        layer = optional_layer(request)
        ranges = [(part.sequence_id, part.start, part.stop) for part in request.ranges]
        num_bytes = self._check_read_size(ranges, layer)
        if request.HasField("key_place") or request.HasField("value_place"):
            if ranges and not num_bytes:
                raise InvalidArgumentError("there are places, and no tokens for them", field="ranges[0]")
            places = target_places(request, num_bytes // 2)
            return await asyncio.shield(to_the_end(self._read_remote(session, ranges, layer, places, num_bytes // 2)))
        key, value = await self._engine.read(session.namespace, ranges, layer)
        session.shared.transfers.travelled_in_messages(num_bytes)
        kind = attention_pb2.ReadResponse
        return encode_tensor(key).inside(kind.KEY_FIELD_NUMBER) + encode_tensor(value).inside(kind.VALUE_FIELD_NUMBER)

    async def _read_remote(
        self,
        session: ServerSession,
        ranges: list[tuple[int, int, int]],
        layer: int | None,
        places: dict[str, Place],
        tensor_bytes: int,
    ) -> attention_pb2.ReadResponse:
        with session.regions.remote(places, tensor_bytes) as memory:
            async with memory.lock:
                read = functools.partial(self._engine.read, session.namespace, ranges, layer)
                return await push_tensors(memory, places, read, tensor_bytes)

    def _arrays(self, session: ServerSession, **tensors: tensor_pb2.Tensor) -> list[Array]:
        """Return input tensors of a call as arrays, from its message or from regions. Those in regions may have as many
        bytes as a message. Raises InvalidArgumentError, and the errors of `Regions.read`."""
        left = self._max_request_bytes

        def read(message: tensor_pb2.SharedMemoryPlace, field: str) -> Array:
            nonlocal left
            left -= message.byte_size
            if left < 0:
                raise InvalidArgumentError(TENSORS_TOO_LARGE, field=f"{field}.byte_size")
            return session.regions.read(place_of(message), field)

        return [to_array(tensor, field, read) for field, tensor in tensors.items()]

    def _check_read_size(self, ranges: list[tuple[int, int, int]], layer: int | None) -> int:
        """Return the bytes of K and V together. Raises InvalidArgumentError."""
        per_token = self._engine.tensor_token_bytes
        if layer is not None:
            per_token //= self._engine.layout.num_layers
        num_tokens = sum(max(0, stop - start) for _, start, stop in ranges)
        if (num_bytes := num_tokens * per_token) > self._max_response_bytes:
            raise response_too_large(num_bytes, self._max_response_bytes, "ranges")
        return num_bytes


def _check_waits(caller: Caller) -> None:
    if caller.gone:
        raise FailedPreconditionError("the caller has gone meanwhile, and nothing was written")


# ---- K and V of Write and Read that lie in the memory of a client on another host
#
# write: transfer K and V ─▶ compare their checksums ─▶ write them to the pool
# read:  read K and V of the pool ─▶ transfer them ─▶ reply with their checksums
#
# K and V lie one after the other in the daemon's memory of the region, which a call has for itself. Checksums are
# computed while bytes travel: of K while V still arrives, and of both while they leave.

# Reads K and V of the pool to uint8 arrays, and returns them with their shapes.
Read: TypeAlias = "Callable[[tuple[Array, Array]], Awaitable[tuple[Tensor, Tensor]]]"

_ONE_BLOCK = bytes(8)


def checksum_of(data: Array) -> int:
    """Return the checksum of uint8 `[num_bytes]`, of at least one byte."""
    return int.from_bytes(_ext.store_checksums(data.ctypes.data, _ONE_BLOCK, data.nbytes, 1), "little")


def source_places(request: attention_pb2.WriteRequest) -> dict[str, Place]:
    """Return the places of K and V by field. Raises InvalidArgumentError for a place without a checksum."""
    places = {"key.shared_memory": request.key.shared_memory, "value.shared_memory": request.value.shared_memory}
    for field, place in places.items():
        if not place.HasField("checksum"):
            raise InvalidArgumentError("is not set, and the region is a remote one", field=f"{field}.checksum")
    return {field: place_of(place) for field, place in places.items()}


async def pull_tensors(
    memory: RemoteMemory,
    request: attention_pb2.WriteRequest,
    places: dict[str, Place],
    arrived_damaged: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Transfer K and V to the daemon. The caller holds the memory's lock while it uses them. Raises
    TransferFailedError, after `arrived_damaged` was called with the number of wrong checksums, and InvalidArgumentError
    for bytes that do not fit the shapes."""
    sums = await memory.run_alone(lambda: memory.pull_ranges(list(places.values()), checksum_of))
    expected = request.key.shared_memory.checksum, request.value.shared_memory.checksum
    if wrong := sum(one != other for one, other in zip(sums, expected, strict=True)):
        arrived_damaged(wrong)
        raise TransferFailedError("K and V have arrived with other checksums")
    arrived = dict(zip(places, memory.packed(list(places.values())), strict=True))
    key, value = (
        to_array(tensor, field, lambda _, place_field: arrived[place_field])
        for tensor, field in ((request.key, "key"), (request.value, "value"))
    )
    return key, value


def target_places(request: attention_pb2.ReadRequest, tensor_bytes: int) -> dict[str, Place]:
    """Return the places for K and V by field. Raises InvalidArgumentError for tensors that do not fit there."""
    places = {"key_place": request.key_place, "value_place": request.value_place}
    for field, place in places.items():
        if place.byte_size < tensor_bytes:
            raise InvalidArgumentError(
                f"{place.byte_size} bytes, the tensor takes {tensor_bytes}", field=f"{field}.byte_size"
            )
    key, value = places.values()
    if key.region == value.region and abs(key.offset - value.offset) < tensor_bytes:
        raise InvalidArgumentError(
            f"{value.offset}: V would overlap K, which takes {tensor_bytes} bytes from {key.offset} on",
            field="value_place.offset",
        )
    return {field: place_of(place) for field, place in places.items()}


async def push_tensors(
    memory: RemoteMemory, places: dict[str, Place], read: Read, tensor_bytes: int
) -> attention_pb2.ReadResponse:
    """Read K and V, and transfer them to the beginnings of their places in the client's memory. The caller holds the
    memory's lock. Raises TransferFailedError, and the errors of `read`."""
    used = [Place(place.region, place.offset, tensor_bytes) for place in places.values()]
    key, value = memory.packed(used)
    arrays = await read((key, value))
    sums = await memory.run_alone(lambda: memory.push_ranges(used, checksum_of))
    response = attention_pb2.ReadResponse()
    results = zip((response.key, response.value), arrays, used, sums, strict=True)
    for message, array, place, checksum in results:
        put_type(array, message)
        message.shared_memory.CopyFrom(
            tensor_pb2.SharedMemoryPlace(
                region=place.region, offset=place.offset, byte_size=place.byte_size, checksum=checksum
            )
        )
    return response


# ---- codec


def place_of(message: tensor_pb2.SharedMemoryPlace) -> Place:
    return Place(message.region, message.offset, message.byte_size)


def place_output(array: Array, target: Target) -> Encoded:
    """Write the elements of a result to its target. Return an encoded Tensor message with their place."""
    place = target.put(array)
    message = tensor_pb2.Tensor()
    put_type(array, message)
    message.shared_memory.region = place.region
    message.shared_memory.offset = place.offset
    message.shared_memory.byte_size = place.byte_size
    return Encoded((message.SerializeToString(),))


def optional_layer(request: attention_pb2.WriteRequest | attention_pb2.ReadRequest) -> int | None:
    return request.layer if request.HasField("layer") else None


def attention_options(options: attention_pb2.AttentionOptions) -> AttentionOptions:
    slopes = np.array(options.alibi_slopes, np.float32) if options.alibi_slopes else None
    sparse = block_sparse(options.block_sparse) if options.HasField("block_sparse") else None
    return AttentionOptions(options.scale or None, options.sliding_window, options.logits_soft_cap, slopes, sparse)


def block_sparse(sparse: attention_pb2.BlockSparse) -> BlockSparse:
    return BlockSparse(
        sparse.vert_stride, sparse.local_blocks, sparse.block_size, sparse.head_sliding_step, sparse.tp_rank
    )
