"""The keeper's lines on stderr, which the daemon's log goes to as well."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

# The limit on lines about messages that the keeper ignores: anyone on the host can send them.
_LINES_PER_WINDOW = 10
_WINDOW_S = 60.0
_LEVELS = ("debug", "info", "warning", "error")


class Log:
    def __init__(
        self,
        log_level: str,
        log_format: str,
        write: Callable[[bytes], object] = lambda line: os.write(sys.stderr.fileno(), line),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log_level` is debug, info, warning or error, and `log_format` is text or json, as for the daemon."""
        self._lowest = _LEVELS.index(log_level)
        self._as_json = log_format == "json"
        self._write, self._clock = write, clock
        self._window_end, self._lines = 0.0, 0

    def warning(self, message: str) -> None:
        self._line("warning", message)

    def error(self, message: str) -> None:
        self._line("error", message)

    def info(self, message: str) -> None:
        self._line("info", message)

    def ignored(self, message: str) -> None:
        """Log that something was ignored, at most 10 times a minute."""
        if self._clock() >= self._window_end:
            self._window_end, self._lines = self._clock() + _WINDOW_S, 0
        self._lines += 1
        if self._lines <= _LINES_PER_WINDOW:
            self.warning(message)

    def _line(self, level: str, message: str) -> None:
        if _LEVELS.index(level) < self._lowest:
            return
        now = time.time()
        milliseconds = int(now % 1 * 1000)
        if self._as_json:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
            entry = {"time": f"{stamp}.{milliseconds:03}Z", "level": level.upper()}
            text = json.dumps(entry | {"logger": "kvservice.keeper", "message": message}, allow_nan=False)
        else:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            text = f"{stamp},{milliseconds:03} {level.upper()} kvservice.keeper: {message}"
        try:
            self._write(f"{text}\n".encode())
        except OSError:
            # Nobody reads stderr any more. The daemon must live on without the line.
            return
