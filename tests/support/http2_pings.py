"""An HTTP/2 client that only sends pings, or nothing at all. gRPC's own client pings at most once a second and always
answers pings."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1


class PingingClient:
    """A context manager for a connection to the server on a unix socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._socket.sendall(PREFACE + _frame(SETTINGS))
        self._stream = self._socket.makefile("rb")

    def __enter__(self) -> PingingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def ping(self) -> bytes:
        """Send a ping. Returns b"" if the server answers it, or the text of the server's GOAWAY."""
        with contextlib.suppress(BrokenPipeError):  # the server's last frames can still be read
            self._socket.sendall(_frame(PING, bytes(8)))
        for kind, flags, payload in self._received():
            if kind == GOAWAY:
                return payload[8:]
            if kind == PING and flags & ACK:
                return b""
        raise AssertionError("the server closed the connection")

    def goodbye(self) -> bytes:
        """Wait until the server closes the connection, which answers nothing. Returns the text of the GOAWAY."""
        return next(payload[8:] for kind, _, payload in self._received() if kind == GOAWAY)

    def _received(self) -> Iterator[tuple[int, int, bytes]]:
        while header := self._stream.read(9):
            yield header[3], header[4], self._stream.read(int.from_bytes(header[:3], "big"))


def _frame(kind: int, payload: bytes = b"") -> bytes:
    """Encode a frame of the connection (stream 0)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload
