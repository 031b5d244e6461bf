"""The messages between a process and the process of its engine: JSON, one message in each packet of a socket pair."""

from __future__ import annotations

import json
import socket
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvservice import plain_json

READ: Final = "read"
WRITE: Final = "write"
Operation: TypeAlias = Literal["read", "write"]

# Most engines of one memory.
MAX_ENGINES: Final = 8
# Most ranges of one transfer, so that its message fits into a packet.
MAX_RANGES: Final = 1024
_MAX_MESSAGE_BYTES: Final = 256 << 10


class Range(NamedTuple):
    """`num_bytes` at `local` of the memory of this side, and at `remote` of that of the other side."""

    local: int
    remote: int
    num_bytes: int


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Raises OSError."""
    connection.send(plain_json.dumps(message, separators=(",", ":")).encode())


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message, or None if the other side has ended. Raises OSError and ValueError."""
    data = connection.recv(_MAX_MESSAGE_BYTES)
    if not data:
        return None
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("the message is no object")
    return message
