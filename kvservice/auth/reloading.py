"""A value that is read from files, and read again when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvservice.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reloading(Generic[T]):
    """`value` is what `read` returned last.

    `read` raises InvalidArgumentError for files that are missing, half written, or do not go together. The constructor
    passes that on; `reload` logs it and keeps the value.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        self._files = files
        self._read = read
        # Of the files that gave the value. Taken before they are read: a change in between is seen at the next reload.
        self._versions = self._current_versions()
        self.value = read()
        # What was logged of files that cannot be used.
        self._logged = ""

    def reload(self) -> bool:
        """Read again if a file has changed since the value was read. Returns whether there is a new value."""
        versions = self._current_versions()
        if versions == self._versions:
            return False
        names = ", ".join(map(str, self._files))
        try:
            self.value = self._read()
        except InvalidArgumentError as error:
            # The next reload tries again: it may be the system that was short of something.
            if str(error) != self._logged:
                logger.warning("%s changed and cannot be used; what was read before stays in use: %s", names, error)
            self._logged = str(error)
            return False
        self._versions, self._logged = versions, ""
        logger.info("%s changed and is in use", names)
        return True

    def _current_versions(self) -> list[tuple[int, int, int, int] | None]:
        """Device, inode, size and time of change of each file; None for one that is missing. Symbolic links are
        followed: Kubernetes changes a mounted secret by changing a link."""
        return [_version(file) for file in self._files]


def _version(file: Path) -> tuple[int, int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
