"""Identification of the user at the other end of a unix socket."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

# struct ucred: pid, uid, gid
_CREDENTIALS = struct.Struct("iII")
_SO_PEERGROUPS = 59
# The largest buffer that Python's getsockopt supports.
_MAX_GROUPS_BYTES = 1024
_READ_AND_WRITE = 0o6


@dataclass(frozen=True)
class Peer:
    """A user: its uid, and the gids of all its groups."""

    uid: int
    gids: frozenset[int]

    def may_read_and_write(self, found: os.stat_result) -> bool:
        """Return whether the kernel would let this user open a file of that owner, group and mode for reading and
        writing. Root gets no special treatment."""
        if found.st_uid == self.uid:
            granted = found.st_mode >> 6
        elif found.st_gid in self.gids:
            granted = found.st_mode >> 3
        else:
            granted = found.st_mode
        return granted & _READ_AND_WRITE == _READ_AND_WRITE


def peer_of(connection: socket.socket) -> Peer:
    """Return the connected user as reported by the kernel. Raises OSError if the user is in more than 256 groups."""
    _, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS_BYTES)
    return Peer(uid, frozenset((gid, *struct.unpack(f"{len(groups) // 4}I", groups))))


def pid_of(connection: socket.socket) -> int:
    """Return the process that connected, or 0 if it is in a PID namespace that this process does not see."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid
