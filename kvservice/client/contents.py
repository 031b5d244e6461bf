"""Requests for the state of sequences and for their K/V."""

from __future__ import annotations

import numpy as np

from kvservice.client import tensors
from kvservice.client.batches import describable_batches, id_batches, token_parts
from kvservice.client.requests import build
from kvservice.client.session_calls import SessionCalls
from kvservice.client.values import PoolInfo, SequenceInfo, from_message
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import attention_pb2, blocks_pb2
from kvservice.wire.tensors import Array


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
    parts = [
        await _read(calls, sequence_id, first, end, layer, timeout_s)
        for first, end in _read_parts(start, stop, layer, calls.context.info)
    ]
    if len(parts) == 1:
        return parts[0]
    keys, values = zip(*parts, strict=True)
    return np.concatenate(keys, axis=-3), np.concatenate(values, axis=-3)


async def _read(
    calls: SessionCalls, sequence_id: int, start: int, stop: int, layer: int | None, timeout_s: float | None
) -> tuple[Array, Array]:
    part = build(attention_pb2.SequenceRange, sequence_id=sequence_id, start=start, stop=stop)
    request = build(attention_pb2.ReadRequest, ranges=[part], layer=layer)
    response = await calls.send("read", request, timeout_s)
    return tensors.from_message(response.key, "key"), tensors.from_message(response.value, "value")


def _read_parts(start: int, stop: int, layer: int | None, info: PoolInfo) -> list[tuple[int, int]]:
    """Split a range into parts that fit into a message. An invalid range stays one part; the daemon refuses it."""
    if stop <= start:
        return [(start, stop)]
    num_layers = 1 if layer is not None else info.num_layers
    token_bytes = 2 * num_layers * info.num_kv_heads * info.head_size * TENSOR_DTYPES[info.dtype].itemsize
    return [(start + first, start + end) for first, end in token_parts(stop - start, token_bytes, info)]
