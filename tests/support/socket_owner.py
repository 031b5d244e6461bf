"""The process behind a unix socket."""

from __future__ import annotations

import socket
import struct
from pathlib import Path


def owner_of(path: Path) -> int:
    """Return the id of the process that listens there."""
    credentials = struct.Struct("3i")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.connect(str(path))
        found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid: int = credentials.unpack(found)[0]
    return pid
