"""The keeper's event loop: signals, notifications, ends of processes, control requests and the time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from kvservice.keeper.control import ControlSocket
from kvservice.keeper.keeper import MAX_DESCRIPTORS, Keeper
from kvservice.keeper.log import Log
from kvservice.keeper.notifications import BadNotificationError, NotifySocket
from kvservice.keeper.notify import FIRST_DESCRIPTOR
from kvservice.keeper.restarts import Ending
from kvservice.keeper.settings import KeeperSettings
from kvservice.keeper.standby import STANDBY_VARIABLE

# ---- the keeper's child processes: how they start, and how they end


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


# ---- the loop


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
UPGRADING = signal.SIGHUP
# These signals must not end the keeper.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
# More messages than these can only be a flood. The kernel queues fewer.
MAX_MESSAGES_AT_ONCE = 1000


class Loop:
    def __init__(self, settings: KeeperSettings) -> None:
        """Raises ControlSocketError."""
        self._log = Log(settings.log_level, settings.log_format)
        self._selector = selectors.DefaultSelector()
        self._signals = _SignalPipe()
        self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
        self._notifications = NotifySocket()
        self._selector.register(self._notifications, selectors.EVENT_READ, lambda: None)
        self._processes = Processes()
        environ = os.environ | {"NOTIFY_SOCKET": self._notifications.address, "FDSTORE": str(MAX_DESCRIPTORS)}
        self._keeper = Keeper(settings, self._processes, environ, time.monotonic, self._log)
        self._control: ControlSocket | None = None
        if settings.control_path:
            keeper = self._keeper
            self._control = ControlSocket(
                settings.control_path, self._selector, keeper.status, keeper.upgrade, keeper.reset
            )

    def run(self) -> int:
        """Run until the keeper has to exit. Returns the exit status."""
        with contextlib.ExitStack() as cleanup:
            if self._control is not None:
                cleanup.callback(self._control.close)
            self._keeper.start()
            while self._keeper.exit_status is None:
                for key, _ in self._selector.select(self._keeper.wait_s()):
                    key.data()
                self._take_ends()
                self._keeper.on_time()
            return self._keeper.exit_status

    def _take_signals(self) -> None:
        for number in self._signals.received():
            if number in STOPPING:
                self._keeper.stop()
            elif number == UPGRADING:
                self._keeper.upgrade(self._log_answer)

    def _log_answer(self, answer: dict[str, Any]) -> None:
        """Log a refusal. The keeper itself logs the result of an upgrade that has begun."""
        if answer["event"] == "result" and answer["pause_s"] is None:
            self._log.warning(f"SIGHUP: {answer['message']}")

    def _take_ends(self) -> None:
        """Read the notifications, then reap. What a process has sent before its end is known when its end is."""
        ended = self._processes.reap()
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                notification = self._notifications.receive()
            except BadNotificationError as error:
                self._log.ignored(f"{error}: ignored")
                continue
            if notification is None:
                break
            self._keeper.notified(notification)
        for pid, ending in ended:
            self._keeper.ended(pid, ending)


class _SignalPipe:
    """Turns signals into bytes to read."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        for number in (*STOPPING, UPGRADING, *IGNORED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._reading.fileno()

    def received(self) -> bytes:
        """Return the numbers of the signals that have arrived."""
        try:
            return self._reading.recv(4096)
        except BlockingIOError:
            return b""
