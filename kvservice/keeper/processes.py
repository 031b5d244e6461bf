"""The keeper's child processes: how they start and end, and whether and when the next one starts."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvservice.keeper.notify import FIRST_DESCRIPTOR, STANDBY_VARIABLE

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


# ---- ends of processes, and whether and when the next one starts


# A process that has served this long ends the series of crashes.
STABLE_S = 60.0
# The fifth crash of a series is the last one, unless the keeper holds state. The first restart is immediate.
DELAYS_S = (0.0, 1.0, 2.0, 4.0)
# The signals that a process gets for what it does itself. Others are sent: by an operator, or by the kernel if there is
# no memory.
FAULTS = (
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS
)  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """The end of a process: by itself with an exit status, or by a signal, which is 0 otherwise."""

    exit_status: int
    signal: int = 0

    @classmethod
    def from_wait(cls, wait_status: int) -> Ending:
        """`wait_status` is what os.waitpid returns."""
        if os.WIFSIGNALED(wait_status):
            number = os.WTERMSIG(wait_status)
            return cls(128 + number, number)
        return cls(os.WEXITSTATUS(wait_status))

    def __str__(self) -> str:
        return f"signal {self.signal}" if self.signal else f"status {self.exit_status}"

    @property
    def is_from_outside(self) -> bool:
        """Whether the process was killed, and did not fail by itself."""
        return is_from_outside(str(self))


def is_from_outside(ended: str) -> bool:
    """Return what `Ending.is_from_outside` says of an ending in words, such as "signal 9"."""
    kind, _, number = ended.partition(" ")
    return kind == "signal" and int(number) not in FAULTS


class CrashLoopError(Exception):
    """The daemon has failed too often in a row. The message lists the latest failures."""


class Restarts:
    """Decides about restarts. A series of crashes ends when a process has served for a minute."""

    def __init__(self) -> None:
        self._series: list[str] = []
        self._num_failed = self._num_killed = 0

    def delay_s(self, ending: Ending, served_s: float | None) -> float:
        """Return the seconds until the next process starts. `served_s` is None for a process that was never ready.

        A process that was killed did not fail: if it served, the next one starts at once, else after a longer time with
        each kill, because the kernel may have had no memory. Raises CrashLoopError.
        """
        if served_s is not None:
            self._num_killed = 0
            if served_s >= STABLE_S:
                self._series.clear()
                self._num_failed = 0
        if ending.is_from_outside:
            if served_s is not None:
                return 0.0
            self._num_killed += 1
            return DELAYS_S[min(self._num_killed, len(DELAYS_S)) - 1]
        self._num_failed += 1
        self._series.append(f"{ending} {'at its start' if served_s is None else f'after {served_s:.1f} s of service'}")
        del self._series[: -len(DELAYS_S) - 1]
        if self._num_failed > len(DELAYS_S):
            raise CrashLoopError(
                f"the daemon ended {self._num_failed} times in a row within {STABLE_S:g} s of service: "
                + ", ".join(self._series)
            )
        return DELAYS_S[self._num_failed - 1]
