"""Processes and folders that end with the process which made them, their owner, also when it is killed.

OwnedProcess  It has one end of a pair of sockets, and the owner the other. When the owner's end is closed, which the
              kernel does at the end of the owner, the kernel kills the process, even if it is frozen.
OwnedFolder   A guard, which is a small process of its own, waits for the end of the owner and removes the folder.

A fork is not the owner: it closes its copies of the sockets, and stops and removes nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from kvservice import owned_guard

# The owner's ends of the pairs. A thread that forks waits until no other one is changing them.
_ends: Final[set[int]] = set()
_ends_lock: Final = threading.RLock()


def _new_pair() -> tuple[int, socket.socket]:
    """Return the owner's end, and the other one."""
    with _ends_lock:
        ours, theirs = socket.socketpair()
        end = ours.detach()
        _ends.add(end)
    return end, theirs


def _close(end: int) -> None:
    with _ends_lock:
        if end in _ends:
            _ends.remove(end)
            os.close(end)


def _close_in_fork() -> None:
    for end in _ends:
        os.close(end)
    _ends.clear()
    _ends_lock.release()


os.register_at_fork(before=_ends_lock.acquire, after_in_parent=_ends_lock.release, after_in_child=_close_in_fork)


def kill_at_close(end: socket.socket, pid: int) -> None:
    """Let the kernel kill a process, which has this socket too, when the other end is closed. A negative `pid` is that
    of a process group. Nobody may receive there: a call that waits would be woken, and the process not killed."""
    fcntl.fcntl(end, fcntl.F_SETOWN, pid)
    fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC)


class OwnedProcess(subprocess.Popen[bytes]):
    """A process in a session of its own, which signals of a terminal do not reach. The kernel kills it, with what it
    has started in this session, when the owner ends, or drops this object."""

    def __init__(self, command: Sequence[str], *, pass_fds: Iterable[int] = (), **options: Any) -> None:
        """`options` are those of Popen. Raises OSError."""
        self._owner = os.getpid()
        self._end, theirs = _new_pair()
        try:
            with theirs:
                super().__init__(command, pass_fds=(*pass_fds, theirs.fileno()), start_new_session=True, **options)
                kill_at_close(theirs, -self.pid)
        except BaseException:
            _close(self._end)
            raise

    @property
    def is_owned(self) -> bool:
        """False in a fork of the owner."""
        return os.getpid() == self._owner

    def __del__(self) -> None:
        # When the interpreter ends, its modules may be gone, and the kernel does the rest. There is no process id if
        # Popen has failed.
        if sys.is_finalizing() or not self.is_owned:
            return
        _close(self._end)
        if getattr(self, "pid", None) is not None and self.returncode is None:
            _thread.start_new_thread(_reap, (self.pid,))


class OwnedFolder:
    """A new folder, as a context manager, which only this user can enter. It is removed when the owner ends, or drops
    this object. So are `sockets`, paths of unix sockets elsewhere, if nobody listens there then."""

    def __init__(self, prefix: str, parent: str | Path | None = None, sockets: Sequence[str | Path] = ()) -> None:
        """Raises OSError."""
        self._owner = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._end, theirs = _new_pair()
        try:
            with theirs:
                self._guard = _start_guard(theirs.fileno(), self.path, sockets)
        except BaseException:
            _close(self._end)
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        weakref.finalize(self, _drop, self._owner, self._end, self._guard).atexit = False

    def remove(self) -> None:
        """Remove the folder, unless this process is a fork of the owner."""
        if os.getpid() != self._owner or self._guard.returncode is not None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()
        _close(self._end)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def _start_guard(link: int, folder: Path, sockets: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    owner = os.pidfd_open(os.getpid())
    try:
        paths = [str(path.absolute()) for path in map(Path, [folder, *sockets])]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", owned_guard.__file__, str(link), str(owner), *paths],
            pass_fds=(link, owner),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It outlives the owner, so it has nothing of the owner's: no session, working directory or variables.
            start_new_session=True,
            cwd="/",
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
        )
    finally:
        os.close(owner)


def _drop(owner: int, end: int, guard: subprocess.Popen[bytes]) -> None:
    """The guard removes the folder when the end is closed."""
    if os.getpid() == owner and guard.returncode is None:
        _close(end)
        _thread.start_new_thread(guard.wait, ())


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
