"""The largest requests of each RPC within the daemon's limits, and some that it refuses.

They are grouped in cycles. A cycle leaves the daemon's state unchanged. It is built before its first run, so that its
requests follow each other closely.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import grpc
import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from kvservice.blocks.arguments import MAX_EXTRA_KEY_BYTES, MAX_EXTRA_KEYS
from kvservice.client import regions
from kvservice.client.channel import CHANNEL_OPTIONS
from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    events_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    regions_pb2,
    scheduler_pb2,
    session_pb2,
    store_pb2,
    tensor_pb2,
    transfer_pb2,
)

# ---- requests of any RPC of the contract, as unchecked bytes, one at a time


_MODULES = (
    session_pb2, blocks_pb2, attention_pb2, regions_pb2, host_pb2, store_pb2, scheduler_pb2, pool_pb2,
    inspect_pb2, events_pb2, transfer_pb2,
)  # fmt: skip


def rpc_name(method: MethodDescriptor) -> str:
    """Return a name that no other RPC of the contract has: that of Lookup of StoreService is StoreLookup."""
    return f"Store{method.name}" if method.containing_service.name == "StoreService" else str(method.name)


METHODS: dict[str, MethodDescriptor] = {
    rpc_name(method): method
    for module in _MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# Context of one request, given RPC and content. The caller appends the status of the response to the list.
OpenSpan = Callable[[str, str], AbstractAsyncContextManager[list[str]]]


class Sender:
    """Sends requests. `token` is the session token for requests without one."""

    def __init__(self, address: str, channel: grpc.aio.Channel, open_span: OpenSpan) -> None:
        self.address = address
        self._channel = channel
        self._span = open_span
        self.token = b""
        self.info = pool_pb2.GetInfoResponse()

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str, open_span: OpenSpan) -> AsyncIterator[Sender]:
        """Yield a sender with a session, whose stream is idle after it is attached."""
        async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
            sender = cls(address, channel, open_span)
            opened = await sender._unary("Open", b"")
            sender.token = session_pb2.OpenResponse.FromString(opened).session_token
            sender.info.ParseFromString(await sender._unary("GetInfo", b""))
            stream: Any = channel.stream_stream(_path("Connect"))()
            await stream.write(attach_call(sender.token).SerializeToString())
            await stream.read()
            yield sender
            await sender._unary("Close", sender._bytes(session_pb2.CloseRequest()))

    async def send(self, rpc: str, content: str, request: Message | bytes) -> bytes:
        """Send a request. Returns the response's bytes, empty if it is refused. `content` describes the large part."""
        data = self._bytes(request)
        async with self._span(rpc, content) as status:
            try:
                answer = await self._unary(rpc, data)
            except grpc.aio.AioRpcError as error:
                status.append(error.code().name)
                return b""
            status.append("OK")
            return answer

    async def stream(self, calls: dict[str, bytes]) -> None:
        """Send calls, by content, on a new stream. Each call is answered before the next one is sent."""
        stream: Any = self._channel.stream_stream(_path("Connect"))()
        for content, data in calls.items():
            async with self._span("Connect", content) as status:
                await stream.write(data)
                status.append(_reply_status(await stream.read()))
        await stream.done_writing()

    async def subscribe(self, content: str, request: Message, num_answers: int) -> None:
        """Receive this many messages of an event stream."""
        stream = self._subscribe(request)
        async with self._span("Subscribe", content) as status:
            for _ in range(num_answers):
                await stream.read()
            status.append("OK")
        stream.cancel()

    async def count_events(self, request: Message, silence_s: float) -> int:
        """Count the messages of a subscriber until it gets none for `silence_s` seconds."""
        stream = self._subscribe(request)
        count = 0
        while True:
            try:
                await asyncio.wait_for(stream.read(), silence_s)
            except TimeoutError:
                return count
            count += 1

    def _subscribe(self, request: Message) -> Any:
        method: Any = self._channel.unary_stream(_path("Subscribe"))
        return method(request.SerializeToString())

    async def _unary(self, rpc: str, data: bytes) -> bytes:
        method: Any = self._channel.unary_unary(_path(rpc))
        answer: bytes = await method(data)
        return answer

    def _bytes(self, request: Message | bytes) -> bytes:
        if isinstance(request, bytes):
            return request
        is_open = isinstance(request, session_pb2.OpenRequest)  # its token is that of a new session
        if "session_token" in request.DESCRIPTOR.fields_by_name and not (is_open or request.session_token):  # type: ignore[attr-defined]
            request.session_token = self.token  # type: ignore[attr-defined]
        return request.SerializeToString()


def attach_call(token: bytes) -> session_pb2.Call:
    return session_pb2.Call(call_id=1, attach=session_pb2.AttachRequest(session_token=token))


def _path(rpc: str) -> str:
    method = METHODS[rpc]
    return f"/{method.containing_service.full_name}/{method.name}"


def _reply_status(data: bytes) -> str:
    reply = session_pb2.Reply.FromString(data)
    return "REFUSED" if reply.HasField("error") else "OK"


# ---- meaningless messages of the highest possible cost, up to the maximum message size


# Field numbers that no message of the contract has.
_NUMBER = 1000
_VARINT, _LENGTH, _GROUP, _END_GROUP = 0, 2, 3, 4


def messages(num_bytes: int) -> Iterator[bytes]:
    """Return messages of different kinds."""
    yield bytes(num_bytes)
    yield unknown_bytes(num_bytes)
    yield unknown_bytes(num_bytes - 1) + b"\0"
    number = _tag(_VARINT) + b"\1"
    yield number * (num_bytes // len(number))
    # The default limits on the number and the size of fields in a request.
    count = 131_072
    yield unknown_bytes(num_bytes // count) * count
    groups = _tag(_GROUP) * 32 + _tag(_END_GROUP) * 32
    yield groups * (num_bytes // len(groups))
    group = _tag(_GROUP) * 2 + unknown_bytes(500) + _tag(_END_GROUP) * 2
    yield group * (num_bytes // len(group))


def unknown_bytes(num_bytes: int) -> bytes:
    """Return an unknown field of this size in bytes, at least 16."""
    size = num_bytes - 6
    length = bytes((0x80 | size & 0x7F, 0x80 | size >> 7 & 0x7F, 0x80 | size >> 14 & 0x7F, size >> 21))
    return _tag(_LENGTH) + length + bytes(size)


def _tag(wire_type: int) -> bytes:
    tag = _NUMBER << 3 | wire_type
    return bytes((0x80 | tag & 0x7F, tag >> 7))


# ---- the largest requests on sequences: the maximum number of sequences per request, and the longest sequence


Cycle = Callable[[], Awaitable[None]]

# Bytes of a message reserved for everything except tensors.
_OVERHEAD = 65536
_SNAPSHOT = inspect_pb2.GetSnapshotRequest(max_sessions=1000, max_sequences=1000)


def many_sequences(sender: Sender) -> Cycle:
    """The maximum number of sequences per request, with equal shares of its tokens, and as many forks of them."""
    info = sender.info
    count, length = info.max_request_sequences, info.max_request_tokens // info.max_request_sequences
    content = f"{count} sequences"
    tokens = np.random.default_rng(2).integers(0, 50_000, (count, length)).tolist()
    sequences = [blocks_pb2.SequenceAllocation(sequence_id=i, token_ids=tokens[i]) for i in range(count)]
    ids, forks = list(range(count)), list(range(count, 2 * count))
    allocate = blocks_pb2.AllocateRequest(sequences=sequences)
    can_allocate = blocks_pb2.CanAllocateRequest(sequences=sequences)
    describe = blocks_pb2.DescribeRequest(sequence_ids=ids, return_token_ids=True, return_block_ids=True)
    read = read_request(sender, ids, length)
    # One token less per sequence, which remain to be computed.
    more = length - 1
    append = blocks_pb2.AppendRequest(
        sequence_ids=forks, token_ids=tokens[0][:more] * count, num_tokens=[more] * count,
        expected_lengths=[length] * count, return_slot_mapping=True,
    )  # fmt: skip
    can_append = blocks_pb2.CanAppendRequest(sequence_ids=forks, num_tokens=[more] * count)

    async def cycle() -> None:
        await sender.send("CanAllocate", content, can_allocate)
        await sender.send("Allocate", content, allocate)
        await sender.send("Describe", content, describe)
        await compute(sender, content, ids, count * length)
        await sender.send("Allocate", f"{count} sequences that there are", allocate)
        await sender.send("CommonPrefix", content, blocks_pb2.CommonPrefixRequest(sequence_ids=ids))
        await sender.send("Read", f"{count} ranges", read)
        await sender.send("CanSwapOut", content, blocks_pb2.CanSwapOutRequest(sequence_ids=ids))
        await sender.send("SwapOut", content, blocks_pb2.SwapOutRequest(sequence_ids=ids))
        await sender.send("CanSwapIn", content, blocks_pb2.CanSwapInRequest(sequence_ids=ids))
        await sender.send("SwapIn", content, blocks_pb2.SwapInRequest(sequence_ids=ids))
        await ahead(sender, ids, length)
        await sender.send("Fork", content, blocks_pb2.ForkRequest(parent_ids=ids, child_ids=forks))
        await sender.send("GetSnapshot", "1000 sequences", _SNAPSHOT)
        await sender.send("CanAppend", f"{more} tokens to each of {content}", can_append)
        await sender.send("Append", f"{more} tokens to each of {content}", append)
        await attend(sender, "Extend", forks, lengths=[length] * count)
        await attend(sender, "Decode", forks, lengths=[length] * count)
        await sender.send("Truncate", content, truncate(forks, [0] * count))
        await sender.send("Free", content, blocks_pb2.FreeRequest(sequence_ids=ids))
        await sender.send("Free", f"{count} empty sequences", blocks_pb2.FreeRequest(sequence_ids=forks))
        await sender.send("ResetPrefixCache", f"{count * length} tokens", blocks_pb2.ResetPrefixCacheRequest())

    return cycle


def longest_sequence(sender: Sender) -> Cycle:
    """One sequence of the maximum length, and the maximum number of forks of it per request."""
    info = sender.info
    length, count = info.max_sequence_tokens, info.max_request_sequences
    num_blocks = length // info.block_size
    content = f"{length} tokens"
    tokens = np.random.default_rng(3).integers(0, 50_000, length).tolist()
    sequence = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=tokens)
    allocate = blocks_pb2.AllocateRequest(sequences=[sequence])
    match = blocks_pb2.MatchPrefixRequest(token_ids=tokens)
    one = blocks_pb2.DescribeRequest(sequence_ids=[1], return_token_ids=True, return_block_ids=True)
    forks = list(range(2, count + 2))
    per_fork = info.max_request_blocks // num_blocks
    batches = [forks[i : i + per_fork] for i in range(0, count, per_fork)]
    pin = blocks_pb2.PinRequest(token_ids=tokens, ttl_s=600.0)

    async def cycle() -> None:
        await sender.send("MatchPrefix", f"{content}, none cached", match)
        await sender.send("CanAllocate", content, blocks_pb2.CanAllocateRequest(sequences=[sequence]))
        await sender.send("Allocate", f"{content}, none cached", allocate)
        await commit(sender, content, [1])
        await sender.send("MatchPrefix", f"{content}, cached", match)
        await sender.send("Describe", content, one)
        pinned = await sender.send("Pin", content, pin)
        pin_id = blocks_pb2.PinResponse.FromString(pinned).pin_id
        for batch in batches:
            await sender.send("Fork", f"{content}, {per_fork} times", fork(batch))
        content_of_all = f"{count} forks of {content}"
        await sender.send("CommonPrefix", content_of_all, blocks_pb2.CommonPrefixRequest(sequence_ids=forks))
        await sender.send("Describe", content_of_all, blocks_pb2.DescribeRequest(sequence_ids=forks))
        await sender.send("GetSnapshot", content_of_all, _SNAPSHOT)
        cut = [length - 1] * count
        await sender.send("Truncate", f"{count} forks by one token", truncate(forks, cut))
        can_append = blocks_pb2.CanAppendRequest(sequence_ids=forks)
        await sender.send("CanAppend", f"a token to each of {content_of_all}", can_append)
        append = blocks_pb2.AppendRequest(sequence_ids=forks, token_ids=[7] * count, return_slot_mapping=True)
        await sender.send("Append", f"a token to each of {content_of_all}", append)
        first = batches[0]
        await sender.send("Truncate", f"{per_fork} forks of {content}", truncate(first, [0] * len(first)))
        await sender.send("Free", content_of_all, blocks_pb2.FreeRequest(sequence_ids=forks))
        await sender.send("CanSwapOut", content, blocks_pb2.CanSwapOutRequest(sequence_ids=[1]))
        await sender.send("SwapOut", content, blocks_pb2.SwapOutRequest(sequence_ids=[1]))
        await sender.send("CanSwapIn", content, blocks_pb2.CanSwapInRequest(sequence_ids=[1]))
        await sender.send("SwapIn", content, blocks_pb2.SwapInRequest(sequence_ids=[1]))
        await sender.send("Free", content, blocks_pb2.FreeRequest(sequence_ids=[1]))
        await sender.send("Allocate", f"{content}, cached", allocate)
        await sender.send("Free", content, blocks_pb2.FreeRequest(sequence_ids=[1]))
        await sender.send("Unpin", content, blocks_pb2.UnpinRequest(pin_id=pin_id))
        await sender.send("ResetPrefixCache", content, blocks_pb2.ResetPrefixCacheRequest())

    return cycle


def fork(child_ids: list[int]) -> blocks_pb2.ForkRequest:
    return blocks_pb2.ForkRequest(parent_ids=[1] * len(child_ids), child_ids=child_ids)


def truncate(ids: list[int], lengths: list[int]) -> blocks_pb2.TruncateRequest:
    return blocks_pb2.TruncateRequest(sequence_ids=ids, lengths=lengths)


async def open_step(sender: Sender, content: str, ids: list[int]) -> int:
    request = blocks_pb2.OpenStepRequest(sequence_ids=ids, return_slot_mapping=True)
    return blocks_pb2.StepResponse.FromString(await sender.send("OpenStep", content, request)).step_id


async def compute(sender: Sender, content: str, ids: list[int], num_tokens: int) -> None:
    """Write the K/V of this many tokens, with messages of the maximum size."""
    step_id = await open_step(sender, content, ids)
    part = (sender.info.max_message_bytes - _OVERHEAD) // _token_bytes(sender)
    for first in range(0, num_tokens, part):
        count = min(part, num_tokens - first)
        request = attention_pb2.WriteRequest(step_id=step_id, layer=0, first_token=first, num_tokens=count)
        request.key.CopyFrom(_tensor(sender, count, 1))
        request.value.CopyFrom(request.key)
        await sender.send("Write", f"{count} tokens", request)


async def commit(sender: Sender, content: str, ids: list[int]) -> None:
    """Commit a step as if its K/V had been written into the mapped pool."""
    await sender.send("MapPool", "writable", host_pb2.MapPoolRequest(writable=True))
    step_id = await open_step(sender, f"{content}, in a mapped pool", ids)
    await sender.send("Commit", content, host_pb2.CommitRequest(step_id=step_id))
    await sender.send("UnmapPool", "", host_pb2.UnmapPoolRequest())


async def ahead(sender: Sender, ids: list[int], length: int) -> None:
    """Commit as many tokens of a step ahead as the sequences have, and open the next step. They are removed again."""
    await sender.send("MapPool", "writable", host_pb2.MapPoolRequest(writable=True))
    content = f"{length} tokens of each of {len(ids)} sequences"
    request = blocks_pb2.OpenAheadRequest(sequence_ids=ids, num_steps=length)
    step = blocks_pb2.StepResponse.FromString(await sender.send("OpenAhead", content, request))
    tokens = [7] * (len(ids) * length)
    following = blocks_pb2.CommitAheadRequest(step_id=step.step_id, token_ids=tokens, num_steps=length)
    await sender.send("CommitAhead", content, following)
    await sender.send("Truncate", content, truncate(ids, [length] * len(ids)))
    await sender.send("UnmapPool", "", host_pb2.UnmapPoolRequest())


def read_request(sender: Sender, ids: list[int], length: int) -> attention_pb2.ReadRequest:
    """Request a response of the maximum size."""
    each = min(length, (sender.info.max_message_bytes - _OVERHEAD) // _token_bytes(sender) // len(ids))
    ranges = [attention_pb2.SequenceRange(sequence_id=i, start=0, stop=each) for i in ids]
    return attention_pb2.ReadRequest(ranges=ranges)


async def attend(sender: Sender, rpc: str, ids: list[int], lengths: list[int]) -> None:
    """Attend with one token per sequence, and as many query heads as fit into a message."""
    await sender.send("Truncate", "by all that was appended", truncate(ids, lengths))
    append = blocks_pb2.AppendRequest(sequence_ids=ids, token_ids=[7] * len(ids), return_slot_mapping=True)
    answer = await sender.send("Append", f"a token to each of {len(ids)} sequences", append)
    # The daemon counts output and log-sum-exp as 9/8 of the query.
    num_heads = (sender.info.max_message_bytes - _OVERHEAD) * 8 // 9 // (len(ids) * sender.info.head_size * 2)
    step_id = blocks_pb2.StepResponse.FromString(answer).step_id
    request = attention_pb2.AttendRequest(step_id=step_id, layer=0, return_lse=True)
    request.query.CopyFrom(_tensor(sender, len(ids), num_heads))
    request.key.CopyFrom(_tensor(sender, len(ids), 1))
    request.value.CopyFrom(request.key)
    request.options.alibi_slopes.extend([0.5] * num_heads)
    await sender.send(rpc, f"{len(ids)} sequences, {num_heads} heads", request)


def _token_bytes(sender: Sender) -> int:
    """Return the bytes of key and value of one token."""
    return 2 * sender.info.num_kv_heads * sender.info.head_size * 2


def _tensor(sender: Sender, num_tokens: int, num_heads: int) -> tensor_pb2.Tensor:
    shape = [num_tokens, num_heads, sender.info.head_size]
    inline = bytes(num_tokens * num_heads * sender.info.head_size * 2)
    return tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_BFLOAT16, shape=shape, inline=inline)


# ---- the largest requests to the scheduler


def schedule_requests(sender: Sender) -> Callable[[], Awaitable[None]]:
    """The maximum number of requests, with equal shares of the tokens of a message, and the longest prompt."""
    info = sender.info
    count, most = info.max_request_sequences, info.max_request_tokens
    length = most // count - 1
    random = np.random.default_rng(4)
    opening = scheduler_pb2.OpenSchedulerRequest(max_step_tokens=most, max_running=count)
    many = scheduler_pb2.AddRequestsRequest(
        requests=[
            scheduler_pb2.ScheduledRequest(
                request_id=i, token_ids=random.integers(0, 50_000, length).tolist(), max_tokens=2, width=1
            )
            for i in range(count)
        ]
    )
    tokens = random.integers(0, 50_000, most - 1).tolist()
    longest = scheduler_pb2.AddRequestsRequest(
        requests=[scheduler_pb2.ScheduledRequest(request_id=0, token_ids=tokens, max_tokens=1, width=1)]
    )
    ids, requests = list(range(count)), f"{count} requests"

    async def step(content: str, **fields: object) -> scheduler_pb2.ScheduleResponse:
        """Make a batch, and commit its step."""
        request = scheduler_pb2.ScheduleRequest(**fields)  # type: ignore[arg-type]
        response = scheduler_pb2.ScheduleResponse.FromString(await sender.send("Schedule", content, request))
        if response.batch:
            await sender.send("Commit", content, host_pb2.CommitRequest(step_id=response.step.step_id))
        return response

    def report(batch: scheduler_pb2.ScheduleResponse) -> scheduler_pb2.StepReport:
        return scheduler_pb2.StepReport(batch=batch.batch, token_ids=[7] * len(batch.sampled_ids))

    async def run(content: str, add: scheduler_pb2.AddRequestsRequest) -> None:
        """Run requests to their end."""
        await sender.send("AddRequests", content, add)
        batch = await step(f"{content}, the prompts")
        while batch.batch:
            batch = await step(f"{content}, a token each", reports=[report(batch)])

    async def cycle() -> None:
        await sender.send("OpenScheduler", "", opening)
        await sender.send("MapPool", "writable", host_pb2.MapPoolRequest(writable=True))
        await run(requests, many)
        await run(f"{most - 1} tokens", longest)
        await sender.send("AddRequests", f"{requests}, all of them cached", many)
        describe = scheduler_pb2.DescribeRequestsRequest(return_token_ids=True)
        await sender.send("DescribeRequests", requests, describe)
        await sender.send("AbortRequests", requests, scheduler_pb2.AbortRequestsRequest(request_ids=ids))
        await sender.send("UnmapPool", "", host_pb2.UnmapPoolRequest())
        await sender.send("ResetPrefixCache", requests, blocks_pb2.ResetPrefixCacheRequest())

    return cycle


# ---- the largest requests of the block store


# The length of the texts of a namespace.
TEXT_CHARACTERS: Final = 256
BLOCK_BYTES: Final = 64
KEY_BYTES: Final = 32
MAX_LEASE_IDS: Final = 4096


def store_requests(sender: Sender) -> Callable[[], Awaitable[None]]:
    """Requests with the largest number of keys, all found or all missing."""
    count = sender.info.max_request_blocks
    blocks = f"{count} blocks"
    random = np.random.default_rng(1)
    here, missing = random.bytes(count * KEY_BYTES), random.bytes(count * KEY_BYTES)
    data = random.bytes(count * BLOCK_BYTES)
    every_second = b"\x55" * -(-count // 8)
    text = "x" * TEXT_CHARACTERS
    identity = store_pb2.StoreNamespace(
        model=text, weights=text, dtype=text, layout=text, key_algorithm=text, block_bytes=BLOCK_BYTES
    )
    opening = store_pb2.OpenNamespaceRequest(namespace=identity)

    async def use(namespace: int) -> None:
        put = store_pb2.BatchPutRequest(namespace_id=namespace, keys=here, data=data)
        await sender.send("StoreBatchPut", blocks, put)
        await sender.send("StoreLookup", blocks, store_pb2.LookupRequest(namespace_id=namespace, keys=here))
        await sender.send("StoreTouch", blocks, store_pb2.TouchRequest(namespace_id=namespace, keys=here))
        await sender.send("StoreBatchGet", blocks, store_pb2.BatchGetRequest(namespace_id=namespace, keys=here))
        acquire = store_pb2.AcquireRequest(namespace_id=namespace, keys=here)
        leased = store_pb2.AcquireResponse.FromString(await sender.send("StoreAcquire", blocks, acquire))
        await sender.send("StoreRenew", "", store_pb2.RenewRequest(lease_id=leased.lease_id, ttl_s=1.0))
        unknown = range(1 << 40, (1 << 40) + MAX_LEASE_IDS - 1)
        release = store_pb2.ReleaseRequest(lease_ids=[leased.lease_id, *unknown])
        await sender.send("StoreRelease", f"{blocks}, {MAX_LEASE_IDS} leases", release)

    async def write(namespace: int) -> None:
        mapping = store_pb2.MapStoreRequest(writable=True)
        mapped = store_pb2.MapStoreResponse.FromString(await sender.send("StoreMapStore", "writable", mapping))
        path = regions.socket_path(sender.address)
        assert path is not None, "the daemon has a unix socket"
        for descriptor in await asyncio.to_thread(regions.fetch, path, mapped.handover_token, 1):
            os.close(descriptor)
        reserve = store_pb2.ReserveRequest(namespace_id=namespace, keys=missing)

        async def reservation() -> int:
            response = await sender.send("StoreReserve", blocks, reserve)
            return store_pb2.ReserveResponse.FromString(response).reservation_id

        await sender.send("StoreAbort", blocks, store_pb2.AbortRequest(reservation_id=await reservation()))
        commit = store_pb2.StoreCommitRequest(reservation_id=await reservation(), written=every_second)
        await sender.send("StoreCommit", f"every second of {blocks}", commit)
        commit = store_pb2.StoreCommitRequest(reservation_id=await reservation(), checksums=bytes(count // 2 * 8))
        await sender.send("StoreCommit", f"{count // 2} blocks, checksums", commit)

    async def cycle() -> None:
        opened = await sender.send("StoreOpenNamespace", "texts", opening)
        namespace = store_pb2.OpenNamespaceResponse.FromString(opened).namespace_id
        await use(namespace)
        await write(namespace)
        await sender.send("StoreRemove", blocks, store_pb2.RemoveRequest(namespace_id=namespace, keys=here))
        await sender.send("StoreClear", blocks, store_pb2.ClearRequest(namespace_id=namespace))

    return cycle


# ---- the cycles


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
    contents = itertools.cycle(list(messages(sender.info.max_message_bytes)))
    rpcs = [name for name, method in METHODS.items() if not (method.client_streaming or method.server_streaming)]

    async def cycle() -> None:
        for rpc, message in zip(rpcs, contents, strict=False):
            await sender.send(rpc, WITHOUT_MEANING, message)

    return cycle


def small(sender: Sender) -> Cycle:
    """Requests with the longest texts, to RPCs that take few bytes."""
    text = "x" * MAX_TEXT_BYTES
    data = text.encode()
    mib = 1 << 20
    requests = [
        ("Ping", "1 MiB", pool_pb2.PingRequest(payload=bytes(MAX_PING_BYTES))),
        ("GetInfo", "", pool_pb2.GetInfoRequest()),
        ("GetStats", "", pool_pb2.GetStatsRequest()),
        ("CreateRegion", "the largest", regions_pb2.CreateRegionRequest(name="region", byte_size=256 * mib)),
        ("RegisterRegion", "texts", regions_pb2.RegisterRegionRequest(
            name=text, key=text, handover_token=data, byte_size=1 << 62)),
        ("RegisterCudaRegion", "texts", regions_pb2.RegisterCudaRegionRequest(
            name=text, raw_handle=data, byte_size=1 << 62)),
        ("ListRegions", "", regions_pb2.ListRegionsRequest()),
        ("UnregisterRegion", "texts", regions_pb2.UnregisterRegionRequest(name=text)),
        ("UnregisterRegion", "all regions", regions_pb2.UnregisterRegionRequest()),
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
    unknown = unknown_bytes(sender.info.max_message_bytes - 100)
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
