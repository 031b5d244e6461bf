"""A server of systemd's notification protocol that does what a test tells it to."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class Received:
    """One message: its lines, its descriptors, which the test closes, and the process that sent it."""

    lines: tuple[str, ...]
    descriptors: tuple[int, ...]
    pid: int


class SmallManager:
    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{address[1:]}" if address[0] == "@" else address)
        self._socket.settimeout(60)

    def __enter__(self) -> SmallManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def receive(self) -> Received:
        """Return the next message."""
        data, ancillary, _, _ = self._socket.recvmsg(8192, socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * 16))
        descriptors: list[int] = []
        pid = 0
        for level, kind, content in ancillary:
            assert level == socket.SOL_SOCKET
            numbers = [int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4)]
            if kind == socket.SCM_RIGHTS:
                descriptors += numbers
            else:
                pid = numbers[0]
        return Received(tuple(data.decode().split("\n")), tuple(descriptors), pid)

    def is_empty(self) -> bool:
        """Return whether no message waits."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(60)
        return False


def memory_file(content: bytes = b"") -> int:
    """Return the descriptor of a new memory file with this content."""
    descriptor = os.memfd_create("kept")
    os.write(descriptor, content)
    return descriptor
