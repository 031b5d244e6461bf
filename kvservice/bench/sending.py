"""Requests of any RPC of the contract, as unchecked bytes, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from kvservice.environment import prepare_grpc

prepare_grpc()

import grpc  # noqa: E402  the environment comes first

from kvservice.client.channel import CHANNEL_OPTIONS  # noqa: E402
from kvservice.v1 import (  # noqa: E402
    attention_pb2,
    blocks_pb2,
    events_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    scheduler_pb2,
    session_pb2,
    shared_memory_pb2,
    store_pb2,
    transfer_pb2,
)

_MODULES = (
    session_pb2, blocks_pb2, attention_pb2, shared_memory_pb2, host_pb2, store_pb2, scheduler_pb2, pool_pb2,
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
