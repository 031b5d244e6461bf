"""A value that is read from files and reloaded when they change."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Generic, TypeVar

from kvservice.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Changed files are used when so many reloads in a row have found the same version of them.
NUM_LOOKS: Final = 3


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading. A named pipe, which would wait for a writer and hold the daemon up, is refused
    at once. Raises OSError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is a directory" if stat.S_ISDIR(mode) else "is not a regular file")
    return os.fdopen(descriptor, "rb")


class Reloading(Generic[T]):
    """Holds the last result of `read` as `value`.

    `read` raises InvalidArgumentError for files that are missing, incomplete, or inconsistent with each other. The
    constructor propagates that error; `reload` logs it and keeps the value.

    A file that is written in place can be valid when half of it is there. So changed files are used when they have
    stayed the same for NUM_LOOKS reloads in a row, and while they are read.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T], reader: str = "gRPC") -> None:
        """`reader` says in the log who uses the files, because two processes read the certificate."""
        self._reader = reader
        self._files = files
        self._read = read
        # Versions of the files that gave the value. They are taken before the files are read, so that the next reload
        # sees a change in between.
        self._versions = self._seen = self._current_versions()
        # How many reloads in a row have found the versions `_seen`.
        self._num_looks = 0
        self.value = read()
        # The last error that was logged, so that a repeated one is not logged again.
        self._logged = ""

    def reload(self) -> bool:
        """Read the files again if they have changed, and not lately. Returns whether there is a new value. Reloads are
        a second or so apart."""
        versions = self._current_versions()
        self._num_looks = self._num_looks + 1 if versions == self._seen else 1
        self._seen = versions
        if versions == self._versions:
            self._logged = ""
            return False
        if self._num_looks < NUM_LOOKS:
            return False
        names = ", ".join(map(str, self._files))
        try:
            value = self._read()
        except InvalidArgumentError as error:
            # The next reload tries again, because the cause may be a temporary shortage of the system.
            if str(error) != self._logged:
                logger.warning(
                    "%s changed and cannot be used by %s; the previous contents stay in use: %s",
                    names,
                    self._reader,
                    error,
                )
            self._logged = str(error)
            return False
        if self._current_versions() != versions:  # somebody began to write while they were read
            return False
        self.value, self._versions, self._logged = value, versions, ""
        logger.info("%s changed and is in use by %s", names, self._reader)
        return True

    @property
    def fault(self) -> str:
        """Say why the files, which have changed, cannot be used, or return an empty string."""
        return self._logged

    def _current_versions(self) -> list[tuple[int, int, int, int] | None]:
        """Return device, inode, size and modification time (ns) of each file, or None if it is missing. Symbolic links
        are followed, because Kubernetes updates a mounted secret by changing a link."""
        return [_version(file) for file in self._files]


def _version(file: Path) -> tuple[int, int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
