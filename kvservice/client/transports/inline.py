"""The inline transport: the tensors travel in messages on the session's stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from kvservice.attention_options import DEFAULT_OPTIONS, AttentionOptions, BlockSparse
from kvservice.client.messages import build, check_size, fits, token_parts, whole
from kvservice.client.step import (
    AttentionCall,
    AttentionResult,
    Transport,
    TransportName,
    WriteCall,
    check_attention,
    check_kv,
)
from kvservice.client.values import StepInfo
from kvservice.v1 import attention_pb2, tensor_pb2
from kvservice.wire.tensors import Array, put_tensor, put_type, to_array

# The places of K and V.
Places: TypeAlias = tuple[tensor_pb2.SharedMemoryPlace, tensor_pb2.SharedMemoryPlace]


class InlineTransport(Transport):
    """See Transport. Tensors that lie in a region already are named instead of sent."""

    name: TransportName = "inline"

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        query, key, value, message_bytes = call.query, call.key, call.value, self.context.info.max_message_bytes
        # The output is as large as the query; the log-sum-exp adds at most an eighth.
        if fits(max(query.nbytes + key.nbytes + value.nbytes, query.nbytes * 9 // 8), message_bytes):
            return await self._send(call)
        check_attention(self.context.info, call)  # a wrong shape is told before the size that it causes
        parts = self._parts(call.step, message_bytes, query, key, value)
        if len(parts) == 1:
            return await self._send(call)
        output = np.empty_like(call.query) if call.out is None else call.out
        lse = call.lse_out
        if call.return_lse and lse is None:
            lse = np.empty(call.lse_shape, np.float32)
        for first, stop in parts:
            self.context.connection.check(call.deadline)
            part = call._replace(
                query=call.query[first:stop],
                key=call.key[first:stop],
                value=call.value[first:stop],
                out=output[first:stop],
                lse_out=None if lse is None else lse[first:stop],
            )
            await self._send(part, first)
        return output, lse

    async def _send(self, call: AttentionCall, first_token: int | None = None) -> AttentionResult:
        """Send one layer, or the part of it that starts at `first_token`."""
        request = build(
            attention_pb2.AttendRequest,
            step_id=call.step.step_id,
            layer=call.layer,
            options=None if call.options is DEFAULT_OPTIONS else options_message(call.options),
            return_lse=call.return_lse,
        )
        if first_token is not None:
            request.first_token, request.num_tokens = first_token, len(call.query)
        self._put(request, call.query, call.key, call.value)
        if self.context.regions.known:
            self._name(request.output_place, call.out)
            self._name(request.lse_place, call.lse_out)
        name = "decode" if call.decode else "extend"
        response = await self.context.connection.call_until(call.deadline, name, request)
        output = self._take(response.output, call.out, "output")
        return output, self._take(response.lse, call.lse_out, "lse") if call.return_lse else None

    def _parts(self, step: StepInfo, message_bytes: int, *arrays: Array) -> list[tuple[int, int]]:
        """Split the step's tokens into parts (first, stop) that fit into a message in both directions. With
        batch_invariant there is one part, because the split would affect the outputs."""
        whole_step = [(0, step.num_tokens)]
        if self.context.info.batch_invariant or any(array.shape[:1] != (step.num_tokens,) for array in arrays):
            return whole_step
        sizes = [array.nbytes // step.num_tokens for array in arrays]
        # The output is as large as the query; the log-sum-exp adds at most an eighth.
        return token_parts(step.num_tokens, max(sum(sizes), sizes[0] * 9 // 8), message_bytes)

    def _put(self, request: Any, *arrays: Array) -> None:
        """Set the tensor fields of a request to the bytes of each array, or to its place in a region."""
        regions, num_bytes = self.context.regions, 0
        for array in arrays:
            num_bytes += array.nbytes
        check_size(num_bytes, "query, key, value", self.context.info)  # the daemon's limit includes tensors in regions
        for name, array in zip(("query", "key", "value")[-len(arrays) :], arrays, strict=True):
            message = getattr(request, name)
            place = regions.find(array) if regions.known else None
            if place is None:
                put_tensor(array, message)
            else:
                put_type(array, message)
                message.shared_memory.CopyFrom(place.message())

    def _name(self, message: Any, array: Array | None) -> None:
        """Set the place of a result, if `array` lies in a region."""
        place = None if array is None else self.context.regions.find(array)
        if place is not None:
            message.CopyFrom(place.message())

    def _take(self, message: Any, wanted: Array | None, field: str) -> Array:
        """Return a result of the response, in `wanted` if given."""
        if wanted is None:
            return to_array(message, field).copy()
        if not message.HasField("shared_memory"):
            np.copyto(wanted, to_array(message, field))
        return wanted

    async def write_prepared(self, call: WriteCall) -> None:
        info, num_tokens = self.context.info, call.step.num_tokens
        if not fits(call.key.nbytes + call.value.nbytes, info.max_message_bytes):
            leading = (num_tokens,) if call.layer is not None else (info.num_layers, num_tokens)
            check_kv(info, leading, call.key, call.value)
        for part in self.parts_of(call, info.max_message_bytes):
            await self.send_part(part)

    async def send_part(self, part: WriteCall, places: Places | None = None) -> None:
        """Send a part of a write, or only the places of its tensors."""
        connection = self.context.connection
        request = build(attention_pb2.WriteRequest, step_id=part.step.step_id, layer=part.layer)
        if part.first_token is not None:
            request.first_token, request.num_tokens = part.first_token, len(part.key)
        if places is None:
            self._put(request, part.key, part.value)
        else:
            for message, array, place in ((request.key, part.key, places[0]), (request.value, part.value, places[1])):
                put_type(array, message)
                message.shared_memory.CopyFrom(place)
        connection.check(part.deadline)
        await connection.call_until(part.deadline, "write", request)

    def parts_of(self, call: WriteCall, message_bytes: int) -> Iterator[WriteCall]:
        """Yield the parts of a write that fit into messages of this size. There is one for all layers if that fits."""
        step, key, value = call.step, call.key, call.value
        if call.layer is not None:
            for first, stop in self._parts(step, message_bytes, key, value):
                is_whole = stop - first == step.num_tokens
                yield call if is_whole else call.part(first, stop)
            return
        num_layers = self.context.info.num_layers
        regular = {key.shape[:2], value.shape[:2]} == {(num_layers, step.num_tokens)}
        if fits(key.nbytes + value.nbytes, message_bytes) or not regular:
            yield call
            return
        for layer in range(num_layers):
            yield from self.parts_of(call._replace(layer=layer, key=key[layer], value=value[layer]), message_bytes)


def options_message(options: AttentionOptions) -> attention_pb2.AttentionOptions:
    """Convert options to their message, in which a scale of 0 is the default scale. Raises InvalidArgumentError."""
    return build(
        attention_pb2.AttentionOptions,
        scale=options.scale or 0.0,
        sliding_window=options.sliding_window,
        logits_soft_cap=options.logits_soft_cap,
        alibi_slopes=None if options.alibi_slopes is None else options.alibi_slopes.tolist(),
        block_sparse=None if options.block_sparse is None else _sparse_message(options.block_sparse),
    )


def _sparse_message(sparse: BlockSparse) -> attention_pb2.BlockSparse:
    fields = {name: whole(value, f"options.block_sparse.{name}") for name, value in asdict(sparse).items()}
    return build(attention_pb2.BlockSparse, **fields)
