"""Handling of a full file descriptor table. One spare descriptor is kept for operations that must not fail."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from kvservice.errors import ResourceExhaustedError

_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Raise ResourceExhaustedError if code in this context opens a file descriptor and none is left."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NONE_LEFT:
            raise
        raise ResourceExhaustedError(f"no file descriptor: {error.strerror}") from None


class Spare:
    """A spare file descriptor."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._open()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free the spare, so that one descriptor can be opened in this context. If the caller does not close it, and
        the table is still full, there is no spare until other descriptors are closed."""
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
