"""Nothing that a test process starts outlives it, by whatever end: its last test, an interrupt, or SIGKILL.

A watcher, in a process of its own, waits for the end of the test process. Then it kills all processes with the test
process's mark in their environment, which children inherit from their parents.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

MARK = "ENDS_WITH_TEST_PROCESS"
# After the end of the test process, processes may still start others for so long.
SETTLING_S = 1.0
GIVING_UP_S = 60.0


@functools.cache
def watch() -> None:
    """Let everything that this process starts from now on end with it. conftest.py calls it first of all."""
    os.environ[MARK] = uuid.uuid4().hex
    _at_the_end(sys.executable, "-I", "-S", __file__, os.environ[MARK])


def unmarked() -> dict[str, str]:
    """Return the environment for a process that may end by itself, such as the installation of a package."""
    return {name: value for name, value in os.environ.items() if name != MARK}


@contextlib.contextmanager
def at_the_end(*command: str) -> Iterator[None]:
    """Run the command if this process ends within the context. A caller that leaves it cleans up itself."""
    waiting = _at_the_end(*command)
    try:
        yield
    finally:
        os.kill(waiting, signal.SIGKILL)
        os.waitpid(waiting, 0)


def _at_the_end(*command: str) -> int:
    """Start a process that runs the command once this process has ended. Return its id."""
    program = [sys.executable, "-I", "-S", __file__, "--after", str(os.getpid()), *command]
    # It runs in its own session, which an interrupt at the terminal does not reach. It keeps nobody's pipes open.
    nothing = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in range(3)]
    return os.posix_spawn(sys.executable, program, unmarked(), setsid=True, file_actions=nothing)


def await_end(process: int) -> None:
    """Wait for the end of the parent process."""
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(process)) as descriptor:
        if os.getppid() == process:
            select.select([descriptor], [], [])


def kill_marked(mark: str) -> None:
    """Kill the processes with this mark, until there have been none for a while."""
    begin = last = time.monotonic()
    while (now := time.monotonic()) < min(last + SETTLING_S, begin + GIVING_UP_S):
        for process in marked(mark):
            last = now
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Return the processes that have started with this mark in their environment. Zombies have no environment."""
    entry, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--after":
        await_end(int(sys.argv[2]))
        os.execvp(sys.argv[3], sys.argv[3:])
    kill_marked(sys.argv[1])
