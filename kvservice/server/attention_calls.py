"""The handlers of AttentionService: they move the bytes of tensors."""

from __future__ import annotations

import asyncio
import functools

from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.server import codec, remote_tensors
from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.loop import Caller, despite_leaving, to_the_end
from kvservice.server.memory.region import Array, Place
from kvservice.server.sessions.session import ServerSession
from kvservice.v1 import attention_pb2
from kvservice.wire.encoded import Encoded, encode_tensor


class AttentionCalls:
    """The responses with tensors are already encoded."""

    def __init__(self, config: ServeConfig, engine: CacheEngine) -> None:
        self._engine = engine
        self._manager = engine.manager
        self._max_request_bytes = config.max_message_bytes
        self._max_response_bytes = codec.max_response_bytes(config)

    def handlers(self) -> tuple[Handler, ...]:
        begun_steps = WhileDraining.FOR_BEGUN_STEPS
        return (
            SessionHandler("decode", attention_pb2.AttendRequest, self.decode, begun_steps),
            SessionHandler("extend", attention_pb2.AttendRequest, self.extend, begun_steps),
            SessionHandler("write", attention_pb2.WriteRequest, self.write, begun_steps),
            SessionHandler("read", attention_pb2.ReadRequest, self.read),
        )

    async def decode(self, session: ServerSession, request: attention_pb2.AttendRequest) -> Encoded:
        """Return an encoded AttendResponse."""
        step = self._manager.get_step(session.namespace, request.step_id)
        if len(step.slot_mapping) != len(step.query_lens):
            raise InvalidArgumentError("a sequence has several tokens in this step: use Extend", field="step_id")
        return await self.extend(session, request)

    async def extend(self, session: ServerSession, request: attention_pb2.AttendRequest) -> Encoded:
        """Return an encoded AttendResponse."""
        options = codec.attention_options(request.options)
        if request.HasField("lse_place") and not request.return_lse:
            raise InvalidArgumentError("there is no log-sum-exp without return_lse", field="lse_place")
        tensors = self._tensors(session)
        query = tensors.array(request.query, "query")
        key, value = tensors.array(request.key, "key"), tensors.array(request.value, "value")
        with (
            codec.output_target(session.regions, request, "output_place") as output_target,
            codec.output_target(session.regions, request, "lse_place") as lse_target,
        ):
            if output_target is None:
                # The output is as large as the query, and the log-sum-exp adds at most an eighth.
                codec.check_response_size(query.nbytes * 9 // 8, self._max_response_bytes, "query")
            else:
                output_target.check_size(query.nbytes)
            if lse_target is not None and query.ndim == 3:
                lse_target.check_size(query.shape[0] * query.shape[1] * 4)
            out = None if output_target is None else output_target.view_for(query, key, value)
            part = request.first_token, request.num_tokens
            output, lse = await self._engine.attend(
                session.namespace,
                request.step_id,
                request.layer,
                query,
                key,
                value,
                options,
                request.return_lse,
                out,
                part,
            )
            kind = attention_pb2.AttendResponse
            response = codec.encode_output(output, output_target).inside(kind.OUTPUT_FIELD_NUMBER)
            if lse is not None:
                response += codec.encode_output(lse, lse_target).inside(kind.LSE_FIELD_NUMBER)
            return response

    async def write(self, session: ServerSession, request: attention_pb2.WriteRequest) -> attention_pb2.WriteResponse:
        if session.regions.is_remote(request.key.shared_memory.region):
            await despite_leaving(functools.partial(self._write_remote, session, request))
        else:
            session.access.transfers.travelled_in_messages(len(request.key.inline) + len(request.value.inline))
            tensors = self._tensors(session)
            key, value = tensors.array(request.key, "key"), tensors.array(request.value, "value")
            await self._write(session, request, key, value)
        return attention_pb2.WriteResponse()

    async def _write(
        self, session: ServerSession, request: attention_pb2.WriteRequest, key: Array, value: Array
    ) -> None:
        part = (request.first_token, request.num_tokens)
        layer = codec.optional_layer(request)
        await self._engine.write(session.namespace, request.step_id, layer, key, value, part)

    async def _write_remote(self, session: ServerSession, request: attention_pb2.WriteRequest, caller: Caller) -> None:
        places = remote_tensors.source_places(request)
        num_bytes = sum(place.byte_size for place in places.values())
        if num_bytes > self._max_request_bytes:
            raise InvalidArgumentError(codec.TENSORS_TOO_LARGE, field="value.shared_memory.byte_size")
        with session.regions.remote(places) as memory:
            async with memory.lock:
                arrived_damaged = session.access.transfers.arrived_damaged
                _check_waits(caller)
                key, value = await remote_tensors.pull(memory, request, places, arrived_damaged)
                _check_waits(caller)
                session.begin_call()
                await self._write(session, request, key, value)

    async def read(
        self, session: ServerSession, request: attention_pb2.ReadRequest
    ) -> attention_pb2.ReadResponse | Encoded:
        layer = codec.optional_layer(request)
        ranges = [(part.sequence_id, part.start, part.stop) for part in request.ranges]
        num_bytes = self._check_read_size(ranges, layer)
        if request.HasField("key_place") or request.HasField("value_place"):
            if ranges and not num_bytes:
                raise InvalidArgumentError("there are places, and no tokens for them", field="ranges[0]")
            places = remote_tensors.target_places(request, num_bytes // 2)
            return await asyncio.shield(to_the_end(self._read_remote(session, ranges, layer, places, num_bytes // 2)))
        key, value = await self._engine.read(session.namespace, ranges, layer)
        session.access.transfers.travelled_in_messages(num_bytes)
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
                return await remote_tensors.push(memory, places, read, tensor_bytes)

    def _tensors(self, session: ServerSession) -> codec.TensorReader:
        return codec.TensorReader(session.regions, self._max_request_bytes)

    def _check_read_size(self, ranges: list[tuple[int, int, int]], layer: int | None) -> int:
        """Return the bytes of K and V together. Raises InvalidArgumentError."""
        per_token = self._engine.tensor_token_bytes
        if layer is not None:
            per_token //= self._engine.layout.num_layers
        num_tokens = sum(max(0, stop - start) for _, start, stop in ranges)
        codec.check_response_size(num_tokens * per_token, self._max_response_bytes, "ranges")
        return num_tokens * per_token


def _check_waits(caller: Caller) -> None:
    if caller.gone:
        raise FailedPreconditionError("the caller has gone meanwhile, and nothing was written")
