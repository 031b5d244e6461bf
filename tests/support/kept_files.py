"""A keeper within the test's process: it keeps duplicates of the descriptors, and starts "processes" with them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvservice
from kvservice.kept import KeptFiles

CHUNK = 1 << 16


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

    def content(self) -> tuple[tuple[str, bytes], ...]:
        """Return the names and bytes of all files, as they were if the process was killed now."""
        return tuple((name, content_of(fd)) for name, fd in self.held.items())

    @classmethod
    def of(cls, files: Iterable[tuple[str, bytes]]) -> HeldFiles:
        keeper = cls()
        keeper.held = {name: copied_file(data) for name, data in files}
        return keeper

    def close(self) -> None:
        for name in list(self.held):
            self.remove(name)


def copied_file(data: bytes) -> int:
    """Return a new memory file with these bytes, as a killed process left them."""
    fd = os.memfd_create("copy", os.MFD_CLOEXEC)
    os.truncate(fd, len(data))
    # Most of a pool and of a store is zeros, which take memory only where they are written.
    for begin in range(0, len(data), CHUNK):
        if (chunk := data[begin : begin + CHUNK]) != bytes(len(chunk)):
            os.pwrite(fd, chunk, begin)
    return fd


def content_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@contextmanager
def collected_garbage() -> Iterator[Callable[[], object]]:
    """Collect the garbage, and yield what collects the garbage from now on, without a look at what is older."""
    gc.collect()
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()


@contextmanager
def without_memory(monkeypatch: pytest.MonkeyPatch, left: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Let the kernel say that so many bytes of memory are available, none unless `left` returns more."""
    read, meminfo = Path.read_text, Path("/proc/meminfo")

    def read_text(path: Path, *rest: Any, **named: Any) -> str:
        return f"MemAvailable: {left() >> 10} kB\n" if path == meminfo else read(path, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", read_text)
        yield


@contextmanager
def at_every_line(of: Iterable[str], call: Callable[[], object]) -> Iterator[None]:
    """Call `call` before each line of code in these files or folders of kvservice."""
    root = str(Path(kvservice.__file__).parent)
    places = tuple(f"{root}/{name}" for name in of)

    def traced(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(places):
            return None
        if event == "line":
            call()
        return traced

    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(None)
