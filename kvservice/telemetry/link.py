"""Questions and answers between the daemon and its observer, one at a time, over a socket pair.

A frame is its length as four bytes, then its bytes. A question's first byte says what is asked.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

_LENGTH = struct.Struct("<I")

# Asked by the observer.
WRITE_VITALS, BLOCK_HASH = b"v", b"h"
# Asked by the daemon: b"c" and the configuration, b"s" and a GetSnapshotRequest.
CONFIGURE, SNAPSHOT = b"c", b"s"
# Begins an answer that is an error.
OK, REFUSED = b"\0", b"\1"


class Asker:
    """The end that asks. Who asks while another waits for an answer waits for its turn."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()

    async def ask(self, question: bytes) -> bytes:
        """Raises ConnectionError when the other end is gone; the link is of no use then."""
        await self._turn.acquire()
        exchange = asyncio.ensure_future(self._exchange(question))
        try:
            return await asyncio.shield(exchange)
        finally:
            if exchange.done():
                self._turn.release()
            else:  # given up: the answer that is still to come must not be taken for the next one's
                exchange.add_done_callback(self._pass_turn)

    def _pass_turn(self, given_up: asyncio.Future[bytes]) -> None:
        if not given_up.cancelled():
            given_up.exception()  # which is of no interest any more
        self._turn.release()

    async def _exchange(self, question: bytes) -> bytes:
        send(self._writer, question)
        return await receive(self._reader)

    def close(self) -> None:
        self._writer.close()


async def open_link(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=sock)


async def answer_all(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Callable[[bytes], Awaitable[bytes]]
) -> None:
    """Answer until the other end is gone."""
    try:
        while True:
            send(writer, await answer(await receive(reader)))
    except ConnectionError:
        pass
    finally:
        writer.close()


def send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(_LENGTH.pack(len(frame)) + frame)


async def receive(reader: asyncio.StreamReader) -> bytes:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the other end is gone") from None
