"""The inline transport: the tensors travel in the messages on the session's stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvservice.client import tensors
from kvservice.client.batches import check_size, fits, token_parts
from kvservice.client.calls import AttentionCall, AttentionResult, WriteCall, options_message
from kvservice.client.requests import build
from kvservice.client.transports.base import Transport, TransportName
from kvservice.client.values import StepInfo
from kvservice.v1 import attention_pb2
from kvservice.wire.tensors import Array, put_tensor, put_type, to_array


class InlineTransport(Transport):
    """See Transport. Tensors that lie in a region already are named instead of sent."""

    name: TransportName = "inline"

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        parts = self._parts(call.step, call.query, call.key, call.value)
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
            options=options_message(call.options),
            return_lse=call.return_lse,
        )
        if first_token is not None:
            request.first_token, request.num_tokens = first_token, len(call.query)
        self._put(request, call.query, call.key, call.value)
        self._name(request.output_place, call.out)
        self._name(request.lse_place, call.lse_out)
        name = "decode" if call.decode else "extend"
        response = await self.context.connection.call_until(call.deadline, name, request)
        output = self._take(response.output, call.out, "output")
        return output, self._take(response.lse, call.lse_out, "lse") if call.return_lse else None

    def _parts(self, step: StepInfo, *arrays: Array) -> list[tuple[int, int]]:
        """Split the step's tokens into parts (first, stop) that fit into a message in both directions. With
        batch_invariant there is one part, because the split would affect the outputs."""
        whole_step = [(0, step.num_tokens)]
        if self.context.info.batch_invariant or any(array.shape[:1] != (step.num_tokens,) for array in arrays):
            return whole_step
        sizes = [array.nbytes // step.num_tokens for array in arrays]
        # The output is as large as the query; the log-sum-exp adds at most an eighth.
        return token_parts(step.num_tokens, max(sum(sizes), sizes[0] * 9 // 8), self.context.info)

    def _put(self, request: Any, *arrays: Array) -> None:
        """Set the tensor fields of a request to the bytes of each array, or to its place in a region."""
        num_bytes = 0
        for name, array in zip(("query", "key", "value")[-len(arrays) :], arrays, strict=True):
            message = getattr(request, name)
            place = self.context.regions.find(array)
            # The daemon's limit includes tensors in regions.
            num_bytes += array.nbytes
            check_size(num_bytes, "query, key, value", self.context.info)
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
            return tensors.from_message(message, field)
        if not message.HasField("shared_memory"):
            np.copyto(wanted, to_array(message, field))
        return wanted

    async def write_prepared(self, call: WriteCall) -> None:
        connection = self.context.connection
        for layer, (first, stop), arrays in self._writes(call.step, call.layer, call.key, call.value):
            request = build(attention_pb2.WriteRequest, step_id=call.step.step_id, layer=layer)
            if stop - first < call.step.num_tokens:
                request.first_token, request.num_tokens = first, stop - first
                arrays = tuple(array[first:stop] for array in arrays)
            self._put(request, *arrays)
            connection.check(call.deadline)
            await connection.call_until(call.deadline, "write", request)

    def _writes(
        self, step: StepInfo, number: int | None, key: Array, value: Array
    ) -> Iterator[tuple[int | None, tuple[int, int], tuple[Array, ...]]]:
        """Yield layer, tokens (first, stop) and tensors of each call. There is one call for all layers if they fit into
        a message."""
        if number is not None:
            yield from ((number, part, (key, value)) for part in self._parts(step, key, value))
            return
        num_layers = self.context.info.num_layers
        regular = {key.shape[:2], value.shape[:2]} == {(num_layers, step.num_tokens)}
        if fits(key.nbytes + value.nbytes, self.context.info) or not regular:
            yield None, (0, step.num_tokens), (key, value)
            return
        for layer in range(num_layers):
            yield from self._writes(step, layer, key[layer], value[layer])
