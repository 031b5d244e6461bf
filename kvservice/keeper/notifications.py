"""The keeper's side of systemd's protocol: the socket that the daemon's notifications arrive on."""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import dataclass

from kvservice.keeper.notify import MAX_MESSAGE_BYTES

# The limit on descriptors in one message. The daemon sends one.
MAX_PASSED = 16
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(MAX_PASSED * 4)


class BadNotificationError(Exception):
    """A message that breaks the protocol. Its descriptors are closed."""


@dataclass(frozen=True)
class Notification:
    """One message of the process `pid`: its assignments, and its descriptors, which the receiver owns."""

    pid: int
    values: dict[str, str]
    descriptors: tuple[int, ...] = ()

    def says(self, assignment: str) -> bool:
        """Return whether NAME=value is one of the assignments."""
        name, _, value = assignment.partition("=")
        return self.values.get(name) == value

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class NotifySocket:
    """A datagram socket. The kernel says which process sent a message. Its name is in the abstract namespace, so that
    a killed keeper leaves no file."""

    def __init__(self) -> None:
        name = f"kvservice-keeper-{os.getpid()}-{os.urandom(8).hex()}"
        self.address = f"@{name}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{name}")
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Notification | None:
        """Return the next message, or None if none waits. Raises BadNotificationError."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        pid, descriptors = _read(ancillary)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise BadNotificationError(f"a message of process {pid} is too large")
            if pid == 0:
                raise BadNotificationError("a message has no sender")
            return Notification(pid, _assignments(data, pid), descriptors)
        except BadNotificationError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        self._socket.close()


def _read(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, tuple[int, ...]]:
    """Return the sender and the descriptors in the ancillary data. The sender is 0 if it is not known."""
    pid = 0
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid = _CREDENTIALS.unpack(content)[0]
    return pid, tuple(descriptors)


def _assignments(data: bytes, pid: int) -> dict[str, str]:
    """Return NAME=value lines as a dict. Raises BadNotificationError."""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        raise BadNotificationError(f"a message of process {pid} is not UTF-8") from None
    values = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if line and not equals:
            raise BadNotificationError(f"a message of process {pid} has a line without =")
        values[name] = value
    values.pop("", None)
    return values
