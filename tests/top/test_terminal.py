"""`kvservice top` on a pseudo-terminal: its colours, and the state of the terminal afterwards."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from inspected_pool import Inspected
from waiting import PATIENCE_S

COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
# Colours by number or by RGB value. Others are among the terminal's sixteen colours.
FIXED_COLOUR = re.compile(rb"\x1b\[(?:\d+;)*[34]8;[\d;]+m")


class Terminal:
    """A pseudo-terminal that runs the command. `output` is everything that it has written."""

    def __init__(self, address: str, environ: dict[str, str]) -> None:
        self._ours, self._theirs = os.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        self.modes_before = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvservice", "top", "--interval", "0.1", "--address", address],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={name: value for name, value in os.environ.items() if name != "NO_COLOR"}
            | {"TERM": "xterm-256color"}
            | environ,
        )
        self.output = b""

    @property
    def modes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.output[-2000:]
            if select.select([self._ours], [], [], 0.05)[0]:
                self.output += os.read(self._ours, 1 << 16)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def terminal(inspected: Inspected, **environ: str) -> Iterator[Terminal]:
    """Wait until the screen shows the pool."""
    opened = Terminal(inspected.address, environ)
    try:
        opened.read_until(lambda: b"of 100 blocks" in opened.output and b"SEQUENCE" in opened.output)
        yield opened
    finally:
        opened.close()


LEAVING: dict[str, Callable[[Terminal], None]] = {
    "q": lambda opened: opened.press(b"q"),
    "ctrl-c": lambda opened: opened.press(b"\x03"),
    "SIGTERM": lambda opened: opened.process.send_signal(signal.SIGTERM),
    "SIGHUP": lambda opened: opened.process.send_signal(signal.SIGHUP),
}


@pytest.mark.parametrize("way", LEAVING)
def test_the_terminal_is_left_as_it_was(inspected: Inspected, way: str) -> None:
    """Meanwhile a name writes nothing to it, and the colours are among its own."""
    with terminal(inspected) as opened:
        assert opened.modes != opened.modes_before
        opened.read_until(lambda: b"evil" in opened.output)
        assert b"\x1b[2J" not in opened.output[opened.output.index(b"evil") :]
        assert COLOUR.search(opened.output)
        assert not FIXED_COLOUR.search(opened.output)
        LEAVING[way](opened)
        opened.read_until(lambda: opened.process.poll() is not None and b"\x1b[?1049l" in opened.output)
        assert opened.process.returncode == 0
        assert opened.modes == opened.modes_before
        for mode in (b"?1049", b"?25", b"?1000", b"?2004"):
            on, off = (b"l", b"h") if mode == b"?25" else (b"h", b"l")
            assert opened.output.rfind(b"\x1b[" + mode + off) > opened.output.rfind(b"\x1b[" + mode + on)


def test_no_color_is_heard(inspected: Inspected) -> None:
    with terminal(inspected, NO_COLOR="1") as opened:
        assert not COLOUR.search(opened.output)
        assert "▓".encode() in opened.output
