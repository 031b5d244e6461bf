"""The handlers of all calls. Each checks the request, calls the engine once and translates the result.

There is one function per RPC, named like the RPC and like the field of a stream's `Call`. The same function serves
unary RPCs and calls on a session's stream.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import numpy as np

from kvservice import __version__
from kvservice.blocks import SequenceInfo, Slices
from kvservice.blocks.slices import in_turn
from kvservice.config import ServeConfig
from kvservice.engine import Engine
from kvservice.errors import InvalidArgumentError
from kvservice.server import codec
from kvservice.server.allocating import ALLOC_STATUS, allocate_response, allocating
from kvservice.server.host_calls import HostCalls
from kvservice.server.sessions import Session, SessionRegistry
from kvservice.server.slices import Answer, in_slices
from kvservice.v1 import attention_pb2, blocks_pb2, inspect_pb2, pool_pb2, session_pb2
from kvservice.wire.encoded import Encoded, encode_tensor
from kvservice.wire.tensors import to_ints, token_array

# Bytes reserved for the fields of a message besides its tensors.
MESSAGE_OVERHEAD = 4096


class Calls(HostCalls):
    """Calls within a session: `(session, request) -> response`.

    Calls that move bytes return a coroutine of the response. Calls that need more than one slice return a task.
    Responses with tensors are already encoded.
    """

    def __init__(self, config: ServeConfig, engine: Engine) -> None:
        super().__init__(engine.manager)
        self._engine = engine
        self._max_request_bytes = config.max_message_bytes
        self._max_request_sequences = config.max_request_sequences
        self._max_response_bytes = config.max_message_bytes - MESSAGE_OVERHEAD

    def allocate(self, session: Session, request: blocks_pb2.AllocateRequest) -> Answer[blocks_pb2.AllocateResponse]:
        sequences = allocating(self._manager.allocate_in_slices, session.space, request)
        return in_slices(sequences, allocate_response)

    def can_allocate(
        self, session: Session, request: blocks_pb2.CanAllocateRequest
    ) -> Answer[blocks_pb2.CanAllocateResponse]:
        asking = allocating(self._manager.can_allocate_in_slices, session.space, request)
        return in_slices(asking, lambda status: blocks_pb2.CanAllocateResponse(status=ALLOC_STATUS[status]))

    def append(self, session: Session, request: blocks_pb2.AppendRequest) -> blocks_pb2.StepResponse:
        step = self._engine.append(
            session.space,
            to_ints(request.sequence_ids),
            token_array(request),
            codec.optional_ints(request.num_tokens, np.int32),
            codec.optional_ints(request.expected_lengths),
            request.lookahead,
        )
        return codec.step_response(step, request.return_slot_mapping, session.access.begin(step))

    def open_step(self, session: Session, request: blocks_pb2.OpenStepRequest) -> blocks_pb2.StepResponse:
        num_tokens = codec.optional_ints(request.num_tokens, np.int32)
        step = self._engine.open_step(session.space, to_ints(request.sequence_ids), num_tokens)
        return codec.step_response(step, request.return_slot_mapping, session.access.begin(step))

    def truncate(self, session: Session, request: blocks_pb2.TruncateRequest) -> blocks_pb2.TruncateResponse:
        self._manager.truncate(session.space, to_ints(request.sequence_ids), to_ints(request.lengths))
        return blocks_pb2.TruncateResponse()

    def fork(self, session: Session, request: blocks_pb2.ForkRequest) -> blocks_pb2.ForkResponse:
        self._manager.fork(session.space, to_ints(request.parent_ids), to_ints(request.child_ids))
        return blocks_pb2.ForkResponse()

    def swap_out(self, session: Session, request: blocks_pb2.SwapOutRequest) -> blocks_pb2.SwapResponse:
        plan = self._engine.swap_out(session.space, to_ints(request.sequence_ids))
        return blocks_pb2.SwapResponse(moved_blocks=len(plan))

    def swap_in(self, session: Session, request: blocks_pb2.SwapInRequest) -> blocks_pb2.SwapResponse:
        plan = self._engine.swap_in(session.space, to_ints(request.sequence_ids))
        return blocks_pb2.SwapResponse(moved_blocks=len(plan))

    def free(self, session: Session, request: blocks_pb2.FreeRequest) -> Answer[blocks_pb2.FreeResponse]:
        freeing = self._manager.free_in_slices(session.space, to_ints(request.sequence_ids))
        return in_slices(freeing, lambda _: blocks_pb2.FreeResponse())

    def describe(self, session: Session, request: blocks_pb2.DescribeRequest) -> Answer[blocks_pb2.DescribeResponse]:
        if request.first < 0:
            raise InvalidArgumentError("is negative", field="first")
        described = self._describe(session, request)
        return in_slices(
            described,
            lambda sequences: blocks_pb2.DescribeResponse(num_sequences=len(session.space), sequences=sequences),
        )

    def _describe(
        self, session: Session, request: blocks_pb2.DescribeRequest
    ) -> Slices[list[blocks_pb2.SequenceDescription]]:
        chosen = functools.partial(
            self._manager.describe_in_slices,
            session.space,
            codec.optional_ints(request.sequence_ids),
            first=request.first,
            limit=self._max_request_sequences,
        )
        sequences = yield from chosen()
        if request.return_token_ids or request.return_block_ids:
            self._check_described(sequences)
            sequences = yield from chosen(
                include_tokens=request.return_token_ids, include_blocks=request.return_block_ids
            )
            self._check_described(sequences)  # the sequences may have grown between the slices
        return (yield from in_turn(codec.description(info) for info in sequences))

    def _check_described(self, sequences: list[SequenceInfo]) -> None:
        num_bytes = sum(4 * (info.length + info.num_blocks) for info in sequences)
        codec.check_response_size(num_bytes, self._max_response_bytes, "sequence_ids")

    def match_prefix(self, _: Session, request: blocks_pb2.MatchPrefixRequest) -> blocks_pb2.MatchPrefixResponse:
        tokens = self._manager.match_prefix(token_array(request), codec.extra_keys(request.extra_keys))
        return blocks_pb2.MatchPrefixResponse(num_cached_tokens=tokens)

    def pin(self, session: Session, request: blocks_pb2.PinRequest) -> blocks_pb2.PinResponse:
        token_ids = token_array(request)
        pin = self._manager.pin(session.space, token_ids, codec.extra_keys(request.extra_keys), ttl_s=request.ttl_s)
        return blocks_pb2.PinResponse(pin_id=pin.pin_id, num_pinned_tokens=pin.num_tokens)

    def unpin(self, session: Session, request: blocks_pb2.UnpinRequest) -> blocks_pb2.UnpinResponse:
        self._manager.unpin(session.space, request.pin_id)
        return blocks_pb2.UnpinResponse()

    def reset_prefix_cache(
        self, _: Session, __: blocks_pb2.ResetPrefixCacheRequest
    ) -> Answer[blocks_pb2.ResetPrefixCacheResponse]:
        resetting = self._manager.reset_prefix_cache_in_slices()
        return in_slices(resetting, lambda _: blocks_pb2.ResetPrefixCacheResponse())

    def common_prefix(
        self, session: Session, request: blocks_pb2.CommonPrefixRequest
    ) -> blocks_pb2.CommonPrefixResponse:
        num_blocks = self._manager.common_prefix_blocks(session.space, to_ints(request.sequence_ids))
        return blocks_pb2.CommonPrefixResponse(num_blocks=num_blocks)

    async def decode(self, session: Session, request: attention_pb2.AttendRequest) -> Encoded:
        """Return an encoded AttendResponse."""
        step = self._manager.get_step(session.space, request.step_id)
        if len(step.slot_mapping) != len(step.query_lens):
            raise InvalidArgumentError("a sequence has several tokens in this step: use Extend", field="step_id")
        return await self.extend(session, request)

    async def extend(self, session: Session, request: attention_pb2.AttendRequest) -> Encoded:
        """Return an encoded AttendResponse."""
        options = codec.attention_options(request.options)
        if request.validate_only:
            self._manager.check_layer(session.space, request.step_id, request.layer)
            self._engine.check_options(options, num_heads=None)
            return Encoded()
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
                session.space, request.step_id, request.layer, query, key, value, options, request.return_lse, out, part
            )
            kind = attention_pb2.AttendResponse
            response = codec.encode_output(output, output_target).inside(kind.OUTPUT_FIELD_NUMBER)
            if lse is not None:
                response += codec.encode_output(lse, lse_target).inside(kind.LSE_FIELD_NUMBER)
            return response

    async def write(self, session: Session, request: attention_pb2.WriteRequest) -> attention_pb2.WriteResponse:
        tensors = self._tensors(session)
        await self._engine.write(
            session.space,
            request.step_id,
            codec.optional_layer(request),
            tensors.array(request.key, "key"),
            tensors.array(request.value, "value"),
            (request.first_token, request.num_tokens),
        )
        return attention_pb2.WriteResponse()

    async def read(self, session: Session, request: attention_pb2.ReadRequest) -> Encoded:
        """Return an encoded ReadResponse."""
        layer = codec.optional_layer(request)
        ranges = [(part.sequence_id, part.start, part.stop) for part in request.ranges]
        self._check_read_size(ranges, layer)
        key, value = await self._engine.read(session.space, ranges, layer)
        kind = attention_pb2.ReadResponse
        return encode_tensor(key).inside(kind.KEY_FIELD_NUMBER) + encode_tensor(value).inside(kind.VALUE_FIELD_NUMBER)

    def _tensors(self, session: Session) -> codec.TensorReader:
        return codec.TensorReader(session.regions, self._max_request_bytes)

    def _check_read_size(self, ranges: list[tuple[int, int, int]], layer: int | None) -> None:
        per_token = self._engine.tensor_token_bytes
        if layer is not None:
            per_token //= self._engine.layout.num_layers
        num_tokens = sum(max(0, stop - start) for _, start, stop in ranges)
        codec.check_response_size(num_tokens * per_token, self._max_response_bytes, "ranges")


class OpenCalls:
    """Calls that need no session: `request -> response`."""

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        sessions: SessionRegistry,
        snapshot: Callable[[bytes], Awaitable[bytes]],
    ) -> None:
        """`snapshot` maps a serialized GetSnapshotRequest to a serialized Snapshot."""
        self._snapshot = snapshot
        self._info = codec.info_response(config, engine.device, __version__)
        self._engine = engine
        self._sessions = sessions

    def get_info(self, _: pool_pb2.GetInfoRequest) -> pool_pb2.GetInfoResponse:
        return self._info

    def get_stats(self, _: pool_pb2.GetStatsRequest) -> pool_pb2.GetStatsResponse:
        return codec.stats_response(self._engine.manager.stats(), len(self._sessions))

    async def get_snapshot(self, request: inspect_pb2.GetSnapshotRequest) -> bytes:
        """Return a serialized Snapshot."""
        codec.check_snapshot_request(request)
        return await self._snapshot(request.SerializeToString())

    def ping(self, request: pool_pb2.PingRequest) -> pool_pb2.PingResponse:
        return pool_pb2.PingResponse(payload=request.payload)

    def open(self, request: session_pb2.OpenRequest) -> session_pb2.OpenResponse:
        session = self._sessions.open(request.name, request.tenant, request.detachable, request.detach_ttl_s)
        return session_pb2.OpenResponse(session_token=session.token, session_id=session.session_id)

    def close(self, request: session_pb2.CloseRequest) -> Answer[session_pb2.CloseResponse]:
        return self._sessions.close_for(request.session_token, request.holder, session_pb2.CloseResponse)
