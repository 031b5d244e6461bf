"""File descriptors where the process has as many as it may: one is kept for what must be done."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from kvservice.errors import ResourceExhaustedError

_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Raises ResourceExhaustedError where a descriptor is opened within and none is left."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NONE_LEFT:
            raise
        raise ResourceExhaustedError(f"no file descriptor: {error.strerror}") from None


class Spare:
    """A descriptor that is kept."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._open()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """One more descriptor can be opened within. If it is not closed again, nothing is lent until others are."""
        self.close()
        try:
            yield
        finally:
            self._open()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
