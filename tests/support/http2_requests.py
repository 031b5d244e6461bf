"""HTTP/2 frames for a client that sends RPCs but receives no responses, which gRPC's own client cannot do."""

from __future__ import annotations

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4


def opening_without_a_window() -> bytes:
    """Return the opening of a connection with window size 0, so that the server may send no data on any stream."""
    return PREFACE + _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))


def request(path: str, stream: int) -> bytes:
    """Encode an RPC with an empty message. U+DC80 and so on in the path stand for single bytes, 0x80 and so on."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    return _frame(HEADERS, END_HEADERS, stream, headers) + _frame(DATA, END_STREAM, stream, bytes(5))


async def until_frame(reader: asyncio.StreamReader, kind: int) -> int:
    """Read until a frame of this kind and return its stream id."""
    while True:
        header = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(header[:3], "big"))
        if header[3] == kind:
            return int.from_bytes(header[5:], "big")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """Encode a string shorter than 127 bytes for HPACK."""
    data = text.encode(errors="surrogateescape")
    return bytes((len(data),)) + data
