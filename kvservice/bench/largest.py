"""The largest requests of each RPC within the daemon's limits, and some that it refuses.

They are grouped in cycles. A cycle leaves the daemon's state unchanged. It is built before its first run, so that its
requests follow each other closely.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import numpy as np

from kvservice.bench import garbage
from kvservice.bench.largest_batches import longest_sequence, many_sequences
from kvservice.bench.largest_schedule import schedule_requests
from kvservice.bench.largest_store import store_requests
from kvservice.bench.sending import METHODS, Sender, attach_call
from kvservice.blocks.arguments import MAX_EXTRA_KEY_BYTES, MAX_EXTRA_KEYS
from kvservice.v1 import (
    blocks_pb2,
    events_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    session_pb2,
    shared_memory_pb2,
    transfer_pb2,
)

Cycle = Callable[[], Awaitable[None]]

# Limits of the daemon.
MAX_TEXT_BYTES: Final = 4096
MAX_PING_BYTES: Final = 1 << 20
WITHOUT_MEANING: Final = "a message without meaning"
# An event stream that is silent for this long has sent everything.
_SILENCE_S: Final = 0.5


async def cycles(sender: Sender) -> AsyncIterator[Cycle]:
    for build in (
        refused,
        small,
        batches_of_nothing,
        extra_keys,
        many_sequences,
        longest_sequence,
        sessions,
        store_requests,
        schedule_requests,
        stream,
    ):
        yield build(sender)
    events = events_pb2.SubscribeRequest(start_number=1)
    count = await sender.count_events(events, _SILENCE_S)
    yield lambda: sender.subscribe(f"{count} batches from the first on", events, count)


def refused(sender: Sender) -> Cycle:
    """Messages of the maximum size to each RPC with large messages, a different one in each cycle."""
    contents = itertools.cycle(list(garbage.messages(sender.info.max_message_bytes)))
    rpcs = [name for name, method in METHODS.items() if not (method.client_streaming or method.server_streaming)]

    async def cycle() -> None:
        for rpc, message in zip(rpcs, contents, strict=False):
            await sender.send(rpc, WITHOUT_MEANING, message)

    return cycle


def small(sender: Sender) -> Cycle:
    """Requests with the longest texts, to RPCs that take few bytes."""
    text = "x" * MAX_TEXT_BYTES
    data = text.encode()
    kinds = shared_memory_pb2
    mib = 1 << 20
    requests = [
        ("Ping", "1 MiB", pool_pb2.PingRequest(payload=bytes(MAX_PING_BYTES))),
        ("GetInfo", "", pool_pb2.GetInfoRequest()),
        ("GetStats", "", pool_pb2.GetStatsRequest()),
        ("SystemSharedMemoryStatus", "texts", kinds.SystemSharedMemoryStatusRequest(name=text)),
        ("SystemSharedMemoryRegister", "texts", kinds.SystemSharedMemoryRegisterRequest(
            name=text, key=text, handover_token=data, byte_size=1 << 62)),
        ("CreateRegion", "the largest", kinds.CreateRegionRequest(name="region", byte_size=256 * mib)),
        ("SystemSharedMemoryStatus", "all regions", kinds.SystemSharedMemoryStatusRequest()),
        ("SystemSharedMemoryUnregister", "all regions", kinds.SystemSharedMemoryUnregisterRequest()),
        ("CudaSharedMemoryStatus", "all regions", kinds.CudaSharedMemoryStatusRequest()),
        ("CudaSharedMemoryRegister", "texts", kinds.CudaSharedMemoryRegisterRequest(
            name=text, raw_handle=data, byte_size=1 << 62)),
        ("CudaSharedMemoryUnregister", "texts", kinds.CudaSharedMemoryUnregisterRequest(name=text)),
        ("CreateRemoteRegion", "texts", transfer_pb2.CreateRemoteRegionRequest(name=text, byte_size=1 << 62)),
        ("RemoveRemoteRegion", "texts", transfer_pb2.RemoveRemoteRegionRequest(name=text)),
        ("OpenLane", "", host_pb2.OpenLaneRequest()),
        ("CloseLane", "", host_pb2.CloseLaneRequest()),
        ("MapPool", "writable", host_pb2.MapPoolRequest(writable=True)),
        ("UnmapPool", "", host_pb2.UnmapPoolRequest()),
        ("GetSnapshot", "1000 rows, a search", inspect_pb2.GetSnapshotRequest(
            max_sessions=1000, max_sequences=1000, search="x" * 256)),
    ]  # fmt: skip

    async def cycle() -> None:
        for request in requests:
            await sender.send(*request)

    return cycle


def batches_of_nothing(sender: Sender) -> Cycle:
    """Batches with empty elements, or with unknown ids."""
    count = sender.info.max_request_sequences
    empty = [blocks_pb2.SequenceAllocation()] * count
    content = f"{count} empty sequences"
    ids = range(1 << 40, (1 << 40) + count)
    requests = [
        ("Allocate", content, blocks_pb2.AllocateRequest(sequences=empty)),
        ("CanAllocate", content, blocks_pb2.CanAllocateRequest(sequences=empty)),
        ("Allocate", f"{count + 1} empty sequences", blocks_pb2.AllocateRequest(sequences=[*empty, empty[0]])),
        ("Free", f"{count} unknown sequences", blocks_pb2.FreeRequest(sequence_ids=ids)),
        ("Describe", f"{count} unknown sequences", blocks_pb2.DescribeRequest(sequence_ids=ids)),
    ]

    async def cycle() -> None:
        for request in requests:
            await sender.send(*request)

    return cycle


def extra_keys(sender: Sender) -> Cycle:
    """The longest prompt with the maximum number of extra keys, all at one position or one per block."""
    limit = sender.info.max_request_tokens
    tokens = np.random.default_rng(1).integers(0, 50_000, limit).tolist()
    requests: list[tuple[str, str, Any]] = []
    for content, step in (("at one position", 0), ("far apart", limit // MAX_EXTRA_KEYS)):
        keys = [blocks_pb2.ExtraKey(position=i * step, key=bytes(MAX_EXTRA_KEY_BYTES)) for i in range(MAX_EXTRA_KEYS)]
        content = f"{MAX_EXTRA_KEYS} extra keys {content}"
        sequence = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=tokens, extra_keys=keys)
        requests += [
            ("MatchPrefix", content, blocks_pb2.MatchPrefixRequest(token_ids=tokens, extra_keys=keys)),
            ("Pin", content, blocks_pb2.PinRequest(token_ids=tokens, extra_keys=keys, ttl_s=0.001)),
            ("Allocate", content, blocks_pb2.AllocateRequest(sequences=[sequence])),
            ("Free", "one sequence", blocks_pb2.FreeRequest(sequence_ids=[1])),
        ]

    async def cycle() -> None:
        for request in requests:
            await sender.send(*request)

    return cycle


def sessions(sender: Sender) -> Cycle:
    """Sessions with the longest names. One is closed with many sequences."""
    count = sender.info.max_request_sequences
    opening = session_pb2.OpenRequest(name="x" * MAX_TEXT_BYTES, tenant="x" * MAX_TEXT_BYTES)
    tokens = list(range(sender.info.max_request_tokens // count))
    sequences = [blocks_pb2.SequenceAllocation(sequence_id=i, token_ids=tokens) for i in range(count)]

    async def cycle() -> None:
        await sender.send("Open", "texts", opening)
        opened = session_pb2.OpenResponse.FromString(await sender.send("Open", "", session_pb2.OpenRequest()))
        token = opened.session_token
        request = blocks_pb2.AllocateRequest(session_token=token, sequences=sequences)
        await sender.send("Allocate", f"{count} equal prompts", request)
        await sender.send("Detach", f"{count} sequences", session_pb2.DetachRequest(session_token=token))
        await sender.send("Close", f"{count} sequences", session_pb2.CloseRequest(session_token=token))

    return cycle


def stream(sender: Sender) -> Cycle:
    """Large calls on a session's stream, and messages that are not calls."""
    count = sender.info.max_request_sequences
    ids = list(range(count))
    tokens = list(range(sender.info.max_request_tokens // count))
    sequences = [blocks_pb2.SequenceAllocation(sequence_id=i, token_ids=tokens) for i in ids]
    unknown = garbage.unknown_bytes(sender.info.max_message_bytes - 100)
    allocate = blocks_pb2.AllocateRequest(sequences=sequences)
    describe = blocks_pb2.DescribeRequest(sequence_ids=ids, return_token_ids=True, return_block_ids=True)
    calls = {
        f"Allocate, {count} equal prompts": session_pb2.Call(call_id=2, allocate=allocate).SerializeToString(),
        f"Describe, {count} sequences": session_pb2.Call(call_id=3, describe=describe).SerializeToString(),
        "an unknown field": session_pb2.Call(call_id=4).SerializeToString() + unknown,
        "Free": session_pb2.Call(call_id=5, free=blocks_pb2.FreeRequest(sequence_ids=ids)).SerializeToString(),
    }

    async def cycle() -> None:
        opened = session_pb2.OpenResponse.FromString(await sender.send("Open", "", session_pb2.OpenRequest()))
        await sender.stream({"attach": attach_call(opened.session_token).SerializeToString()} | calls)
        await sender.send("Close", "", session_pb2.CloseRequest(session_token=opened.session_token))

    return cycle
