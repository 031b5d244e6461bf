"""Logging of the daemon's processes, as text lines or as one JSON object per line."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from kvservice import plain_json

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Limit on log lines of one kind that unauthenticated clients can cause, so that they cannot fill the disk.
_LINES_PER_WINDOW = 20
_WINDOW_S = 60.0
_NAMES = {"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"}


def configure(level: str, format: str) -> None:  # noqa: A002  the option's name
    """Log to stderr, from `level` up, in `format` text or json.

    A JSON object has time (RFC 3339, UTC), level, logger and message; the fields that the caller passes as `extra`,
    such as session_id, request_id, method and status; and exception if there is one.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_json() if format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_of_a_client)


def _is_not_of_a_client(record: logging.LogRecord) -> bool:
    """Return False for gRPC's tracebacks about clients that disconnect, or are disconnected, before they read a
    response, and about metadata that are not UTF-8."""
    error = None if record.exc_info is None else record.exc_info[1]
    if isinstance(error, asyncio.CancelledError | UnicodeDecodeError):
        return False
    return not str(record.msg).startswith("ExecuteBatchError raised in core")


def _json() -> logging.Formatter:
    return JsonFormatter(
        ("levelname", "name", "message"),
        rename_fields=_NAMES,
        timestamp="time",
        json_serializer=plain_json.dumps,
        # color_message is the HTTP server's copy of the message with terminal colours.
        reserved_attrs=[*RESERVED_ATTRS, "color_message"],
    )


class LogBudget:
    """Writes at most 20 lines per minute. The first line of the next minute says how many were dropped."""

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
