"""A plain TCP connection between two processes: the least that bytes cost between them. The kernel copies them from the
memory of one to the memory of the other, in system calls of a block each, and nobody compares them.

The peer's process: `python -m kvservice.bench.socket_peer PORT NUM_BYTES BLOCK_BYTES`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvservice.bench.peer_process import START_S, BlockBatch
from kvservice.owned import OwnedProcess
from kvservice.wire.tensors import Array

_PUT, _GET, _DONE = b"p", b"g", b"d"
_LOOPBACK: Final = "127.0.0.1"


class SocketPeer:
    """The blocks of a batch are copied to the memory of the peer, and back."""

    def __init__(self, connection: socket.socket, batch: BlockBatch) -> None:
        self._connection, self.batch = connection, batch

    def put(self) -> None:
        self._connection.sendall(_PUT)
        send(self._connection, self.batch.values)
        assert self._connection.recv(1) == _DONE, "the peer has all of it"

    def get(self) -> None:
        self._connection.sendall(_GET)
        receive(self._connection, self.batch.out)

    def empty(self) -> None:
        """Nothing has to be removed."""


def send(connection: socket.socket, blocks: Array) -> None:
    for block in blocks:
        connection.sendall(block.data)


def receive(connection: socket.socket, blocks: Array) -> None:
    """Raises ConnectionError."""
    for block in blocks:
        left = block.data
        while left:
            count = connection.recv_into(left)
            if not count:
                raise ConnectionError("the other process has ended")
            left = left[count:]


@contextlib.contextmanager
def socket_peer(batch: BlockBatch) -> Iterator[SocketPeer]:
    """Start a peer. Raises OSError."""
    count, block_bytes = batch.values.shape
    with socket.create_server((_LOOPBACK, 0)) as listening:
        listening.settimeout(START_S)
        numbers = (listening.getsockname()[1], count * block_bytes, block_bytes)
        command = [sys.executable, "-P", "-m", "kvservice.bench.socket_peer", *map(str, numbers)]
        process = OwnedProcess(command)
        try:
            connection = listening.accept()[0]
            with connection:
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield SocketPeer(connection, batch)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    port, num_bytes, block_bytes = map(int, sys.argv[1:])
    blocks = np.ones((num_bytes // block_bytes, block_bytes), np.uint8)
    with socket.create_connection((_LOOPBACK, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while wanted := connection.recv(1):
            if wanted == _PUT:
                receive(connection, blocks)
                connection.sendall(_DONE)
            else:
                send(connection, blocks)


if __name__ == "__main__":
    main()
