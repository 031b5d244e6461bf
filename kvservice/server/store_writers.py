"""The processes that fetched the memory of the block store for writing, while they live."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket

from kvservice.server.peers import pid_of
from kvservice.store import Quarantine

MAX_WRITERS = 256


class StoreWriters:
    """Watches these processes, and tells the quarantine when one of them has ended."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        # The descriptor (pidfd_open(2)) and name of each process, by its pid, which no other process gets meanwhile.
        self._watched: dict[int, tuple[int, int]] = {}
        self._names = itertools.count()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, connection: socket.socket) -> int:
        """Watch the process at the other end of a unix socket. Returns its name for the quarantine. Raises OSError if
        the process is not visible from here, or if there are MAX_WRITERS."""
        pid = pid_of(connection)
        if pid not in self._watched:
            if len(self._watched) >= MAX_WRITERS:
                raise OSError(errno.EMFILE, f"{MAX_WRITERS} processes can write to the store")
            descriptor = os.pidfd_open(pid)
            self._watched[pid] = descriptor, next(self._names)
            asyncio.get_running_loop().add_reader(descriptor, self._ended, pid)
        return self._watched[pid][1]

    def _ended(self, pid: int) -> None:
        descriptor, name = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._quarantine.ended(name)
