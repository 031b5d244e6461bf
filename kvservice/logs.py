"""How the daemon's processes log: lines for people, or an object in each line for machines."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Of one kind of event that strangers can cause, so that they cannot fill the disk.
_LINES_PER_WINDOW = 20
_WINDOW_S = 60.0
_NAMES = {"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"}


def configure(level: str, format: str) -> None:  # noqa: A002  the option's name
    """Log to stderr, from `level` up, as text or json.

    An object has time (RFC 3339, UTC), level, logger, message; session_id, request_id, method, status and whatever
    else the place that logs gives as `extra`; exception if there was one.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_json() if format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_client_gone)


def _is_no_client_gone(record: logging.LogRecord) -> bool:
    """gRPC logs a traceback as an error when a client goes away, or is given up, before it has read an answer."""
    is_cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not is_cancelled and not str(record.msg).startswith("ExecuteBatchError raised in core")


def _json() -> logging.Formatter:
    return JsonFormatter(
        ("levelname", "name", "message"),
        rename_fields=_NAMES,
        timestamp="time",
        # The message once more, with a terminal's colours, by the HTTP server.
        reserved_attrs=[*RESERVED_ATTRS, "color_message"],
    )


class LogBudget:
    """Writes at most 20 lines a minute. The first line after that says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._window_end = -math.inf
        self._lines = 0

    def write(self, level: int, message: str, *args: object, extra: Mapping[str, object] | None = None) -> None:
        now = self._clock()
        if now >= self._window_end:
            left_out = self._lines - _LINES_PER_WINDOW
            if left_out > 0:
                self._logger.log(level, "%d more lines like those before were left out", left_out)
            self._window_end, self._lines = now + _WINDOW_S, 0
        self._lines += 1
        if self._lines <= _LINES_PER_WINDOW:
            self._logger.log(level, message, *args, extra=extra)
