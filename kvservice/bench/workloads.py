"""Calls to a real daemon for measurements: their preparation, execution and decoding."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from kvservice.environment import prepare_grpc

prepare_grpc()

import grpc  # noqa: E402  the environment comes first

from kvservice.bench.harness import normal  # noqa: E402
from kvservice.client.channel import CHANNEL_OPTIONS  # noqa: E402
from kvservice.client.messages import (  # noqa: E402
    MAX_JOINED_BYTES,
    join_calls,
    make_call,
    open_stub,
    parse_replies,
    take_reply,
)
from kvservice.v1 import (  # noqa: E402
    attention_pb2,
    attention_pb2_grpc,
    blocks_pb2,
    blocks_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
)
from kvservice.wire.tensors import put_tensor, to_array  # noqa: E402

IN_FLIGHT = 32
NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 4, 2, 28, 128
# Bytes of query, key and value of one token, bfloat16.
TOKEN_BYTES = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE * 2
LONG_CONTEXT, SHORT_CONTEXT = 1024, 16
POOL: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "bfloat16",
    "num_blocks": 8192,
    "swap_space_gib": 0.0,
    "max_sequences": 8192,
    "num_threads": 1,
}

# Layers, KV heads, head size.
Shape = tuple[int, int, int]
SHAPE = (NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE)

# A call before serialization: the field of `Call`, and the function that builds the request.
Request = tuple[str, Callable[[], Any]]


class Api:
    """A session's two paths to the daemon: unary RPCs and its stream."""

    def __init__(self, channel: grpc.aio.Channel, token: bytes, stream: Any) -> None:
        stubs = (
            blocks_pb2_grpc.BlockServiceStub(channel),  # type: ignore[no-untyped-call]
            attention_pb2_grpc.AttentionServiceStub(channel),  # type: ignore[no-untyped-call]
            pool_pb2_grpc.PoolServiceStub(channel),  # type: ignore[no-untyped-call]
        )
        self._methods = {
            name.lower(): getattr(stub, name) for stub in stubs for name in vars(stub) if not name.startswith("_")
        }
        self._token = token
        self.stream = stream
        self._call_ids = itertools.count(1)

    async def unary(self, name: str, request: Any) -> Any:
        if name != "ping":
            request.session_token = self._token
        return await self._methods[name.replace("_", "")](request)

    async def call(self, name: str, request: Any) -> Any:
        await self.stream.write(make_call(next(self._call_ids), name, request))
        [reply] = await self.stream.read()
        return take_reply(reply)

    async def call_all(self, calls: list[Request]) -> list[Any]:
        """Send calls that wait together, as the client does: in few messages. Returns their responses."""
        writing = asyncio.create_task(self._write_all(calls))
        responses = await self._read_all(len(calls))
        await writing
        return responses

    async def _write_all(self, calls: list[Request]) -> None:
        waiting: list[bytes] = []
        for name, build in calls:
            call = make_call(next(self._call_ids), name, build())
            if waiting and sum(map(len, waiting)) + len(call) > MAX_JOINED_BYTES:
                await self.stream.write(join_calls(waiting))
                waiting.clear()
            waiting.append(call)
        await self.stream.write(join_calls(waiting))

    async def _read_all(self, count: int) -> list[Any]:
        responses: list[Any] = []
        while len(responses) < count:
            responses += map(take_reply, await self.stream.read())
        return responses


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Api]:
    async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        sessions = open_stub(channel, parse_replies)
        opened = await sessions.Open(session_pb2.OpenRequest(name="bench"))
        stream = sessions.Connect()
        api = Api(channel, opened.session_token, stream)
        await api.call("attach", session_pb2.AttachRequest(session_token=opened.session_token))
        yield api
        await sessions.Close(session_pb2.CloseRequest(session_token=opened.session_token))


class Workload:
    """A kind of call. `begin` and `end` run before and after a round of IN_FLIGHT independent calls, and are not
    measured."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def begin(self) -> list[Request]:
        raise NotImplementedError

    async def end(self) -> None:
        pass


class Echo(Workload):
    async def begin(self) -> list[Request]:
        return [("ping", lambda: pool_pb2.PingRequest(payload=bytes(100)))] * IN_FLIGHT


class Sequences(Workload):
    """Workloads that allocate and free sequences."""

    ids: Iterator[int] = itertools.count(1 << 40)

    def __init__(self, api: Api, parent: int) -> None:
        super().__init__(api)
        self._parent = parent
        self._made: list[int] = []

    def _new_ids(self) -> list[int]:
        self._made = list(itertools.islice(self.ids, IN_FLIGHT))
        return self._made

    async def end(self) -> None:
        await self.api.call("free", blocks_pb2.FreeRequest(sequence_ids=self._made))


class Allocate(Sequences):
    async def begin(self) -> list[Request]:
        # The first token is different in every prompt, so there are no prefix hits.
        prompts = [(i, [i & 0x7FFFFFFF, *random.choices(range(50_000), k=LONG_CONTEXT - 1)]) for i in self._new_ids()]
        return [("allocate", partial(self._request, i, prompt)) for i, prompt in prompts]

    @staticmethod
    def _request(sequence_id: int, prompt: list[int]) -> Any:
        sequence = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=prompt)
        return blocks_pb2.AllocateRequest(request_id=sequence_id, sequences=[sequence])


class Fork(Sequences):
    async def begin(self) -> list[Request]:
        return [("fork", partial(self._request, [i])) for i in self._new_ids()]

    def _request(self, child_ids: list[int]) -> Any:
        parents = [self._parent] * len(child_ids)
        return blocks_pb2.ForkRequest(request_id=child_ids[0], parent_ids=parents, child_ids=child_ids)


class Free(Fork):
    async def begin(self) -> list[Request]:
        await self.api.call("fork", self._request(self._new_ids()))
        return [("free", partial(self._free_request, i)) for i in self._made]

    @staticmethod
    def _free_request(sequence_id: int) -> Any:
        # An unused id.
        return blocks_pb2.FreeRequest(request_id=sequence_id << 1, sequence_ids=[sequence_id])

    async def end(self) -> None:
        pass


class Groups(Workload):
    """Workloads on running batches: `num_groups` batches of `size` sequences, all forks of one sequence."""

    def __init__(self, api: Api, num_groups: int, size: int, length: int, shape: Shape = SHAPE) -> None:
        super().__init__(api)
        self._length = length
        self._shape = shape
        self.groups = [list(itertools.islice(Sequences.ids, size)) for _ in range(num_groups)]

    async def prepare(self) -> None:
        parent = await new_sequence(self.api, self._length, self._shape)
        for group in self.groups:
            request = blocks_pb2.ForkRequest(parent_ids=[parent] * len(group), child_ids=group)
            await self.api.call("fork", request)

    def append_request(self, group: list[int]) -> Any:
        return blocks_pb2.AppendRequest(
            sequence_ids=group, token_ids=[7] * len(group), expected_lengths=[self._length] * len(group)
        )

    async def end(self) -> None:
        for group in self.groups:
            lengths = [self._length] * len(group)
            await self.api.call("truncate", blocks_pb2.TruncateRequest(sequence_ids=group, lengths=lengths))


class Append(Groups):
    async def begin(self) -> list[Request]:
        return [("append", partial(self.append_request, group)) for group in self.groups]


class Decode(Groups):
    def __init__(self, api: Api, num_bytes: int) -> None:
        size = num_bytes // TOKEN_BYTES
        super().__init__(api, IN_FLIGHT // NUM_LAYERS, size, SHORT_CONTEXT)
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        self._query, self._key, self._value = (normal(size, count, HEAD_SIZE) for count in heads)

    async def begin(self) -> list[Request]:
        steps = [await self.api.call("append", self.append_request(group)) for group in self.groups]
        return [
            ("decode", partial(self._request, step.step_id, layer)) for step in steps for layer in range(NUM_LAYERS)
        ]

    def _request(self, step_id: int, layer: int) -> Any:
        request = attention_pb2.AttendRequest(step_id=step_id, layer=layer)
        put_tensor(self._query, request.query)
        put_tensor(self._key, request.key)
        put_tensor(self._value, request.value)
        return request


async def new_sequence(api: Api, length: int, shape: Shape = SHAPE) -> int:
    """Return a computed sequence in a pool of that shape."""
    sequence_id = next(Sequences.ids)
    prompt = random.choices(range(50_000), k=length)
    await api.call("allocate", Allocate._request(sequence_id, prompt))
    step = await api.call("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
    request = attention_pb2.WriteRequest(step_id=step.step_id)
    num_layers, *rest = shape
    kv = normal(num_layers, length, *rest)
    put_tensor(kv, request.key)
    put_tensor(kv, request.value)
    await api.call("write", request)
    return sequence_id


def take(response: Any) -> None:
    """Decode a response as a client does: copy the tensor's bytes into an array."""
    if isinstance(response, attention_pb2.AttendResponse) and response.HasField("output"):
        to_array(response.output, "output").copy()


async def latencies(workload: Workload, call: Callable[[str, Any], Awaitable[Any]]) -> list[float]:
    """Return the seconds of each call of a round, with one call in flight."""
    seconds = []
    for name, build in await workload.begin():
        start = time.perf_counter()
        take(await call(name, build()))
        seconds.append(time.perf_counter() - start)
    await workload.end()
    return seconds
