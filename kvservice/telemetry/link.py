"""Requests and replies between daemon and observer over a socket pair, one at a time.

A frame is its length as four bytes, followed by its bytes. The first byte of a request is its type.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NamedTuple

from kvservice import plain_json

_LENGTH = struct.Struct("<I")

# Requests of the observer.
WRITE_STATS, BLOCK_HASH = b"w", b"h"
# Requests of the daemon: b"c" and the configuration; b"s" and a GetSnapshotRequest; b"o", a length, so many bytes of
# `ShownPart` as JSON, and a GetSnapshotRequest.
CONFIGURE, SNAPSHOT, SNAPSHOT_OF = b"c", b"s", b"o"
# First byte of a reply: success or error.
OK, REFUSED = b"\0", b"\1"

# The limit on the characters of a search for sessions and sequences, of the page and of GetSnapshot.
MAX_SEARCH_LENGTH: Final = 256


class ShownPart(NamedTuple):
    """What a snapshot may tell of: one tenant, and the ids of its sessions."""

    tenant: str
    session_ids: Collection[int]


def snapshot_question(request: bytes, part: ShownPart | None) -> bytes:
    """Return the request for a snapshot of a part, or of everything."""
    if part is None:
        return SNAPSHOT + request
    encoded = plain_json.dumps([part.tenant, sorted(part.session_ids)]).encode()
    return SNAPSHOT_OF + _LENGTH.pack(len(encoded)) + encoded + request


def asked_snapshot(question: bytes) -> tuple[bytes, ShownPart | None]:
    """Return the arguments of `snapshot_question`."""
    if question[:1] == SNAPSHOT:
        return question[1:], None
    begin = 1 + _LENGTH.size
    end = begin + _LENGTH.unpack_from(question, 1)[0]
    tenant, session_ids = json.loads(question[begin:end])
    return question[end:], ShownPart(tenant, frozenset(session_ids))


class Asker:
    """The requesting end. Concurrent requests are sent one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()

    async def ask(self, question: bytes) -> bytes:
        """Send a request and return its reply. Raises ConnectionError if the link is closed, by either end."""
        await self._turn.acquire()
        exchange = asyncio.ensure_future(self._exchange(question))
        try:
            return await asyncio.shield(exchange)
        finally:
            if exchange.done():
                self._turn.release()
            else:  # cancelled: the pending reply must not be taken for the reply to the next request
                exchange.add_done_callback(self._pass_turn)

    def _pass_turn(self, given_up: asyncio.Future[bytes]) -> None:
        if not given_up.cancelled():
            given_up.exception()  # retrieved so that asyncio does not log it
        self._turn.release()

    async def _exchange(self, question: bytes) -> bytes:
        if self._writer.is_closing():
            raise ConnectionResetError("the link is closed")
        send(self._writer, question)
        return await receive(self._reader)

    def close(self) -> None:
        self._writer.close()


async def open_link(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=sock)


async def answer_all(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Callable[[bytes], Awaitable[bytes]]
) -> None:
    """Answer requests until the other end closes the link."""
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
        raise ConnectionResetError("the other end closed the link") from None
