"""The host memory that sessions share with the daemon: regions, lanes and step tables, of all sessions together.

A client may keep memory mapped that its session has given up. It counts until the last descriptor and mapping of it
outside of the daemon is gone, for only then does the system have it back.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal

from kvservice.blocks import Slices
from kvservice.blocks.slices import finish
from kvservice.errors import QuotaExceededError, ResourceExhaustedError
from kvservice.pool.sealed import SealedMemory
from kvservice.server import descriptors, unmapping

logger = logging.getLogger(__name__)

# Memory that is left to the daemon itself, for the calls in flight.
RESERVE_BYTES = 64 << 20
# How often memory that clients keep is looked at.
LOOK_S = 1.0
# Each takes a descriptor of the daemon.
MAX_KEPT = 1024


class Budget:
    """Counts bytes before they are taken."""

    def __init__(self, limit_mib: int) -> None:
        self._limit_mib = limit_mib
        self.used_bytes = 0
        # Descriptors of memory that was given up and that clients keep, with their bytes.
        self._kept: dict[int, int] = {}
        # For memory that is given up where no descriptor is left.
        self.spare = descriptors.Spare()

    def take(self, num_bytes: int, field: str = "") -> None:
        """Raises QuotaExceededError with the field."""
        limit_bytes = self._limit_mib << 20
        if self.used_bytes + num_bytes > limit_bytes or len(self._kept) >= MAX_KEPT:
            self.look()
        if len(self._kept) >= MAX_KEPT:
            raise QuotaExceededError(
                f"clients keep {MAX_KEPT} pieces of memory that their sessions gave up", field=field,
                limit="max_shared_mib", value=self._limit_mib,
            )  # fmt: skip
        if self.used_bytes + num_bytes > limit_bytes:
            raise QuotaExceededError(
                f"{num_bytes} bytes, all sessions have {self.used_bytes} of {self._limit_mib} MiB", field=field,
                limit="max_shared_mib", value=self._limit_mib,
            )  # fmt: skip
        self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, "more was given back than taken"

    def make(self, name: str, num_bytes: int, *, read_only: bool = False, field: str = "") -> BudgetedMemory:
        """Memory for a client and the daemon. Raises QuotaExceededError, and ResourceExhaustedError where there is not
        that much memory, with the field."""
        return finish(self.make_in_slices(name, num_bytes, read_only=read_only, field=field))

    def make_in_slices(
        self, name: str, num_bytes: int, *, read_only: bool = False, field: str = ""
    ) -> Slices[BudgetedMemory]:
        """`make`; all of it counts from the first slice on."""
        self.take(num_bytes, field)
        try:
            sealed = yield from SealedMemory.in_slices(
                name, num_bytes, read_only=read_only, reserve_bytes=RESERVE_BYTES
            )
        except OSError as error:
            self.give_back(num_bytes)
            text = f"no {num_bytes} bytes of shared memory: {error.strerror}"
            raise ResourceExhaustedError(text, field=field) from None
        except GeneratorExit:
            self.give_back(num_bytes)
            raise
        return BudgetedMemory(sealed, self)

    def keep(self, descriptor: int, num_bytes: int) -> None:
        """Count memory of this descriptor, which becomes the budget's, until no client has it."""
        if not self._kept:
            asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
        self._kept[descriptor] = num_bytes

    def look(self) -> None:
        """Give back what clients do not keep any more."""
        for descriptor, num_bytes in list(self._kept.items()):
            if not _is_open_elsewhere(descriptor):
                del self._kept[descriptor]
                unmapping.close(descriptor)
                self.give_back(num_bytes)

    def _look_again(self) -> None:
        self.look()
        if self._kept:
            asyncio.get_running_loop().call_later(LOOK_S, self._look_again)


class BudgetedMemory:
    """Sealed memory that counts for as long as it is taken. `descriptor` opens it for a client."""

    def __init__(self, sealed: SealedMemory, budget: Budget) -> None:
        self.sealed = sealed
        self._budget = budget
        self._is_open = True

    def descriptor(self) -> int:
        """A descriptor to be handed over, the caller's to close: an open file of its own, unlike a duplicate, so that
        it is known when the last one is closed. Raises ResourceExhaustedError."""
        with descriptors.needed():
            return self._open()

    def _open(self) -> int:
        return os.open(f"/proc/self/fd/{self.sealed.fd}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """The daemon needs it no longer. Does nothing the second time."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            with self._budget.spare.lent():
                descriptor = self._open()
                self.sealed.close()
        except OSError as error:  # another thread has taken the one that was lent
            self.sealed.close()
            self._budget.give_back(self.sealed.num_bytes)
            logger.warning("it is not known whether a client keeps %d bytes: %s", self.sealed.num_bytes, error)
            return
        if _is_open_elsewhere(descriptor):
            self._budget.keep(descriptor, self.sealed.num_bytes)
        else:
            os.close(descriptor)
            self._budget.give_back(self.sealed.num_bytes)


def _is_open_elsewhere(descriptor: int) -> bool:
    """Whether there is an open file of this memory besides that of `descriptor`, or a mapping of one. The kernel grants
    a write lease (fcntl(2)) only where there is none. If somebody opens the file in that very moment, it sends a
    signal: SIGURG, which is ignored, in place of SIGIO, which would end the process."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
