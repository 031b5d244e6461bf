"""The processes that fetched the memory of the block store for writing, while they live."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

from kvservice.server.memory.fd_passing import pid_of
from kvservice.store import BlockStore, WriterRecord

MAX_WRITERS = 256
# The fields of /proc/PID/stat after the name of the program, which ends with the last parenthesis.
_START_FIELD = 19


class StoreWriters:
    """Watches these processes, and tells the quarantine when one of them has ended. They are still known after a
    restart of the daemon."""

    def __init__(self, store: BlockStore) -> None:
        self._quarantine, self._ids = store.quarantine, store.ids
        self._records = store.records.writers
        # The descriptor (pidfd_open(2)) and name of each process, by its pid, which no other process gets meanwhile.
        self._watched: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, connection: socket.socket) -> int:
        """Watch the process at the other end of a unix socket. Returns its name for the quarantine. Raises OSError if
        the process is not visible from here, or if there are MAX_WRITERS."""
        pid = pid_of(connection)
        if pid not in self._watched:
            if len(self._watched) >= MAX_WRITERS:
                raise OSError(errno.EMFILE, f"{MAX_WRITERS} processes can write to the store")
            descriptor, name = os.pidfd_open(pid), next(self._ids)
            self._records[name] = WriterRecord(pid, _start_of(pid))
            self._watch(descriptor, pid, name)
        return self._watched[pid][1]

    def recover(self) -> set[int]:
        """Watch the processes that the daemon's process before knew, if they live. Returns their names."""
        for name, record in self._records.items():
            try:
                descriptor = os.pidfd_open(record.pid)
            except OSError:
                self._records.discard(name)
                continue
            if _start_of(record.pid) == record.start:
                self._watch(descriptor, record.pid, name)
            else:  # another process has the pid now
                os.close(descriptor)
                self._records.discard(name)
        return {name for _, name in self._watched.values()}

    def close(self) -> None:
        """Watch no process any more."""
        while self._watched:
            self._forget(next(iter(self._watched)))

    def _watch(self, descriptor: int, pid: int, name: int) -> None:
        self._watched[pid] = descriptor, name
        asyncio.get_running_loop().add_reader(descriptor, self._ended, pid)

    def _forget(self, pid: int) -> int:
        """Return the name of the process."""
        descriptor, name = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        return name

    def _ended(self, pid: int) -> None:
        name = self._forget(pid)
        self._quarantine.ended(name)
        self._records.discard(name)


def _start_of(pid: int) -> int:
    """Return the start time of a process in ticks since the boot, or 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[_START_FIELD])
