"""Reading and writing of files in large pieces, past the page cache where the filesystem allows it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvservice.saved.errors import DamagedFileError
from kvservice.saved.format import SECTOR_BYTES, rounded_up

# The descriptor of a file that was refused: O_DIRECT is not supported.
_NOT_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that files can be read into and written from directly."""
    return mmap.mmap(-1, max(rounded_up(num_bytes), SECTOR_BYTES))


class NotRegularError(OSError):
    """Something else than a regular file has the name."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EPERM, "it is not a regular file", str(path))


class DirectFile:
    """An open file. Several threads may use it. Offsets, sizes and memory are multiples of SECTOR_BYTES."""

    def __init__(self, path: Path, flags: int) -> None:
        """Raises OSError."""
        self.path = path
        self._fd = _open_direct(path, flags)
        self._uses = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def _using(self) -> Iterator[int]:
        """Keep the descriptor open. A call of another thread with a closed one could reach another file."""
        with self._changed:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the file is closed", str(self.path))
            self._uses += 1
        try:
            yield self._fd
        finally:
            with self._changed:
                self._uses -= 1
                self._changed.notify_all()

    def write(self, data: memoryview, offset: int) -> None:
        """Raises OSError."""
        with self._using() as fd:
            while data:
                written = os.pwritev(fd, [data], offset)
                data, offset = data[written:], offset + written

    def read(self, data: memoryview, offset: int) -> None:
        """Fill the memory. Raises DamagedFileError if the file ends before that, and OSError."""
        with self._using() as fd:
            while data:
                count = os.preadv(fd, [data], offset)
                if not count:
                    raise DamagedFileError("it is too short")
                data, offset = data[count:], offset + count

    def size(self) -> int:
        with self._using() as fd:
            return os.fstat(fd).st_size

    def sync(self) -> None:
        """Return when all that was written is on the disk. Raises OSError."""
        with self._using() as fd:
            os.fsync(fd)

    def close(self) -> None:
        """Close the file after the calls in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._uses)
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, and nothing else: what a link names is not opened, and a pipe is not waited for. Raises
    NotRegularError and OSError."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotRegularError(path) from None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise NotRegularError(path)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return open_regular(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
    return open_regular(path, flags & ~os.O_EXCL)  # the refused call may have created the file


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
