"""Requests for the state of sequences and for their K/V."""

from __future__ import annotations

import numpy as np

from kvservice.client import remote_tensors
from kvservice.client.batches import describable_batches, id_batches, token_parts
from kvservice.client.context import Context
from kvservice.client.requests import build, whole
from kvservice.client.session_calls import SessionCalls
from kvservice.client.values import SequenceInfo, from_message
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import attention_pb2, blocks_pb2
from kvservice.wire.tensors import Array, to_array


async def describe(
    calls: SessionCalls, ids: list[int] | None, token_ids: bool, block_ids: bool, timeout_s: float | None
) -> list[SequenceInfo]:
    """See SessionCore.describe."""
    info = calls.context.info
    if ids is None:
        found = await _describe_all(calls, timeout_s)
    else:
        found = [one for batch in id_batches(ids, info) for one in await _describe(calls, batch, timeout_s)]
    if not (token_ids or block_ids):
        return found
    details = {"return_token_ids": token_ids, "return_block_ids": block_ids}
    batches = describable_batches(found, info)
    return [one for batch in batches for one in await _describe(calls, batch, timeout_s, **details)]


async def _describe_all(calls: SessionCalls, timeout_s: float | None) -> list[SequenceInfo]:
    found: list[SequenceInfo] = []
    while True:
        response = await calls.send("describe", build(blocks_pb2.DescribeRequest, first=len(found)), timeout_s)
        found += [from_message(SequenceInfo, one) for one in response.sequences]
        if not response.sequences or len(found) >= response.num_sequences:
            return found


async def lost_sequences(calls: SessionCalls, timeout_s: float | None) -> list[int]:
    """See SessionCore.lost_sequences."""
    found: list[int] = []
    while True:
        response = await calls.send("describe", build(blocks_pb2.DescribeRequest, first=len(found)), timeout_s)
        found += response.lost_sequence_ids
        if not response.lost_sequence_ids or len(found) >= response.num_lost_sequences:
            return found


async def _describe(
    calls: SessionCalls, ids: list[int], timeout_s: float | None, **details: bool
) -> list[SequenceInfo]:
    request = build(blocks_pb2.DescribeRequest, sequence_ids=ids, **details)
    response = await calls.send("describe", request, timeout_s)
    return [from_message(SequenceInfo, one) for one in response.sequences]


async def read(
    calls: SessionCalls, sequence_id: int, start: int, stop: int, layer: int | None, timeout_s: float | None
) -> tuple[Array, Array]:
    """See SessionCore.read."""
    info = calls.context.info
    start, stop = whole(start, "start"), whole(stop, "stop")
    if not 0 <= start < stop <= info.max_sequence_tokens:  # the daemon refuses it, and its memory is not allocated
        first = max(start, stop - 1) if start >= 0 else start
        await calls.send("read", _read_request(sequence_id, first, stop, layer), timeout_s)
    shape = (*((info.num_layers,) if layer is None else ()), stop - start, info.num_kv_heads, info.head_size)
    key, value = np.empty(shape, TENSOR_DTYPES[info.dtype]), np.empty(shape, TENSOR_DTYPES[info.dtype])
    parts = []
    for first, end in _read_parts(start, stop, layer, calls.context):
        tokens = np.s_[..., first - start : end - start, :, :]
        request = _read_request(sequence_id, first, end, layer)
        parts.append(_part(calls, request, key[tokens], value[tokens], timeout_s))
    await remote_tensors.read(calls.context, parts)
    return key, value


def _read_request(sequence_id: int, start: int, stop: int, layer: int | None) -> attention_pb2.ReadRequest:
    part = build(attention_pb2.SequenceRange, sequence_id=sequence_id, start=start, stop=stop)
    request: attention_pb2.ReadRequest = build(attention_pb2.ReadRequest, ranges=[part], layer=layer)
    return request


def _part(
    calls: SessionCalls, request: attention_pb2.ReadRequest, key: Array, value: Array, timeout_s: float | None
) -> remote_tensors.KVPart:
    """Return a part that is read to these arrays."""

    async def send(places: remote_tensors.Places | None) -> attention_pb2.ReadResponse:
        if places is None:
            response = await calls.send("read", request, timeout_s)
            np.copyto(key, to_array(response.key, "key"))
            np.copyto(value, to_array(response.value, "value"))
        else:
            placed = attention_pb2.ReadRequest(key_place=places[0], value_place=places[1])
            placed.MergeFrom(request)
            response = await calls.send("read", placed, timeout_s)
        answer: attention_pb2.ReadResponse = response
        return answer

    return remote_tensors.KVPart(key, value, send)


def _read_parts(start: int, stop: int, layer: int | None, context: Context) -> list[tuple[int, int]]:
    """Split a range into parts that fit into a message."""
    info = context.info
    num_layers = 1 if layer is not None else info.num_layers
    token_bytes = 2 * num_layers * info.num_kv_heads * info.head_size * TENSOR_DTYPES[info.dtype].itemsize
    parts = token_parts(stop - start, token_bytes, context.remote.part_bytes(info))
    return [(start + first, start + end) for first, end in parts]
