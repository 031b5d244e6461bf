"""The process that a client belongs to. One that is forked from it has no threads of gRPC, and shares its sockets."""

from __future__ import annotations

import os

from kvservice.errors import FailedPreconditionError


class OwnProcess:
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise FailedPreconditionError in a process that was forked from this one."""
        if not self.is_here:
            raise FailedPreconditionError(
                f"the client belongs to process {self._pid}, from which this one was forked: make a client here"
            )
