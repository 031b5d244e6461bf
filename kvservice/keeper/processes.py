"""The keeper's child processes: how they start, and how they end."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from kvservice.keeper.notify import FIRST_DESCRIPTOR
from kvservice.keeper.restarts import Ending
from kvservice.keeper.standby import STANDBY_VARIABLE

_PR_SET_PDEATHSIG = 1
# The exit status of a shell for a command that cannot be executed.
_NOT_EXECUTED = 127


class Processes:
    """Starts, signals and reaps processes."""

    def __init__(self) -> None:
        self._alive: set[int] = set()

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Mapping[str, int],
        standby: int | None = None,
    ) -> int:
        """Start a process that gets duplicates of these descriptors, and return its id.

        The variables LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES tell it about the descriptors. A standby process also
        gets a duplicate of the descriptor `standby`; KVSERVICE_STANDBY is its number. The process is killed when this
        process ends in any way. Raises OSError if there is no memory for it.
        """
        keeper = os.getpid()
        # A signal must not arrive between fork and exec, where a handler of this process would take it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _execute(keeper, command, environ, descriptors, standby, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._alive.add(pid)
        return pid

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process that was started here, unless it has been reaped."""
        if pid in self._alive:
            os.kill(pid, number)

    def reap(self) -> list[tuple[int, Ending]]:
        """Return the processes that have ended since the last call. As process 1 of a container this process also
        reaps those that nobody else waits for."""
        ended: list[tuple[int, Ending]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            self._alive.discard(pid)
            ended.append((pid, Ending.from_wait(status)))


def _execute(
    keeper: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    descriptors: Mapping[str, int],
    standby: int | None,
    signals_blocked: Iterable[int],
) -> NoReturn:
    """Turn this process, a fork of the keeper, into the command."""
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_blocked)
        _end_with(keeper)
        about = {
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(descriptors)),
            "LISTEN_FDNAMES": ":".join(descriptors),
        }
        passed = [*descriptors.values()]
        if standby is not None:
            about[STANDBY_VARIABLE] = str(FIRST_DESCRIPTOR + len(passed))
            passed.append(standby)
        _move(passed)
        os.execve(command[0], list(command), {**environ, **about})
    except BaseException as error:
        os.write(sys.stderr.fileno(), f"cannot execute {command[0]}: {error}\n".encode())
    finally:
        os._exit(_NOT_EXECUTED)


def _end_with(keeper: int) -> None:
    """Have the kernel kill this process when its parent ends. The setting outlives exec."""
    # ctypes stays out of the keeper's own memory.
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
    if os.getppid() != keeper:
        raise ProcessLookupError("the keeper has ended")


def _move(descriptors: Sequence[int]) -> None:
    """Give the process duplicates of the descriptors as 3, 4, ... All others are closed on exec."""
    beyond = FIRST_DESCRIPTOR + len(descriptors)
    duplicates = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in descriptors]
    for number, duplicate in enumerate(duplicates, FIRST_DESCRIPTOR):
        os.dup2(duplicate, number, inheritable=True)
