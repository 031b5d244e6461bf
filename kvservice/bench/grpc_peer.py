"""A store of nothing but messages: the least that `bench store` can take by messages over gRPC for Python.

Each message has as many blocks as the client of the block store puts into one, and is answered before the next.
"""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc
import uvloop

from kvservice.bench.peer_process import BlockBatch, BlockWay, running
from kvservice.client.channel import CHANNEL_OPTIONS
from kvservice.client.store.link import MESSAGE_BYTES
from kvservice.environment import GRPC_ENVIRONMENT, MALLOC_ENVIRONMENT
from kvservice.owned import OwnedFolder

PATH: Final = "/bare/Exchange"


class GrpcPeer:
    """Sends the blocks in messages and receives them in others."""

    def __init__(self, channel: Any, batch: BlockBatch) -> None:
        self.batch = batch
        self._step = max(1, MESSAGE_BYTES // batch.values.shape[1])
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies: Any = channel.stream_stream(PATH)(iter(self._requests.get, None))

    def _exchange(self, message: bytes) -> bytes:
        self._requests.put(message)
        reply: bytes = next(self._replies)
        return reply

    def put(self) -> None:
        for first in range(0, len(self.batch.values), self._step):
            self._exchange(self.batch.values[first : first + self._step].tobytes())

    def get(self) -> None:
        for first in range(0, len(self.batch.out), self._step):
            part = self.batch.out[first : first + self._step]
            part.reshape(-1).data[:] = self._exchange(b"get")

    def empty(self) -> None:
        self._exchange(b"clear")

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)


@contextlib.contextmanager
def grpc_peer(batch: BlockBatch) -> Iterator[BlockWay]:
    """Start the server. Raises PeerMissingError."""
    errors, environment = (grpc.FutureTimeoutError,), GRPC_ENVIRONMENT | MALLOC_ENVIRONMENT
    with OwnedFolder("kvservice-grpc-") as directory:
        address = f"unix:{directory}/grpc.sock"
        with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
            ready = grpc.channel_ready_future(channel)
            serving = [sys.executable, "-P", "-m", __name__, address]
            with (
                running(serving, lambda: ready.result(timeout=1.0), errors, environment),
                contextlib.closing(GrpcPeer(channel, batch)) as peer,
            ):
                yield peer


async def serve(address: str) -> None:
    """Keep the messages of a put, and return them one after the other, again and again."""
    kept: list[bytes] = []

    async def exchange(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        number = 0
        async for message in requests:
            if message == b"get":
                yield kept[number % len(kept)]
                number += 1
            elif message == b"clear":
                kept.clear()
                number = 0
                yield b"done"
            else:
                kept.append(message)
                yield b"done"

    _, service, method = PATH.split("/")
    handlers: dict[str, Any] = {method: grpc.stream_stream_rpc_method_handler(exchange)}
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
