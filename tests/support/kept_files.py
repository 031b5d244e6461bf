"""A keeper within the test's process: it keeps duplicates of the descriptors, and starts "processes" with them."""

from __future__ import annotations

import os

from kvservice.kept import KeptFiles


class HeldFiles:
    """Implements FileKeeper. `start` returns what a new process gets."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []

    def store(self, name: str, fd: int) -> None:
        assert name not in self.held, "a second descriptor of a name would be kept beside the first one"
        self.calls.append(("store", name))
        self.held[name] = os.dup(fd)

    def remove(self, name: str) -> None:
        self.calls.append(("remove", name))
        if (fd := self.held.pop(name, None)) is not None:
            os.close(fd)

    def barrier(self) -> None:
        self.calls.append(("barrier", ""))

    def start(self) -> KeptFiles:
        return KeptFiles({name: os.dup(fd) for name, fd in self.held.items()}, self)

    def close(self) -> None:
        for name in list(self.held):
            self.remove(name)


def copied_file(data: bytes) -> int:
    """Return a new memory file with these bytes, as a killed process left them."""
    fd = os.memfd_create("copy", os.MFD_CLOEXEC)
    os.truncate(fd, len(data))
    os.pwrite(fd, data, 0)
    return fd


def content_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
