"""The processes that fetched the memory of the block store for writing, while they live."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from kvservice.server.peers import pid_of
from kvservice.store import Quarantine

MAX_WRITERS = 256


class StoreWriters:
    """Watches these processes, and tells the quarantine when one of them has ended."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        # The descriptor (pidfd_open(2)) of each process, by its pid, which no other process gets meanwhile.
        self._watched: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, connection: socket.socket) -> int:
        """Watch the process at the other end of a unix socket. Returns its name for the quarantine. Raises OSError if
        the process is not visible from here, or if there are MAX_WRITERS."""
        pid = pid_of(connection)
        if pid not in self._watched:
            if len(self._watched) >= MAX_WRITERS:
                raise OSError(errno.EMFILE, f"{MAX_WRITERS} processes can write to the store")
            self._watched[pid] = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._watched[pid], self._ended, pid)
        return pid

    def _ended(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._quarantine.ended(pid)
