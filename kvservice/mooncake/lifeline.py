"""A child process that ends with its parent, also if it is frozen."""

from __future__ import annotations

import fcntl
import os
import signal
import socket


def kill_at_close(lifeline: socket.socket | int, pid: int) -> None:
    """Let the kernel kill a process, which has this socket or pipe too, when the other end is closed. Nothing is sent
    there."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, pid)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
