"""How the daemon's processes log: lines for people, or an object in each line for machines."""

from __future__ import annotations

import logging

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_NAMES = {"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"}


def configure(level: str, format: str) -> None:  # noqa: A002  the option's name
    """Log to stderr, from `level` up, as text or json.

    An object has time (RFC 3339, UTC), level, logger, message; session_id, request_id, method, status and whatever
    else the place that logs gives as `extra`; exception if there was one.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_json() if format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _json() -> logging.Formatter:
    return JsonFormatter(
        ("levelname", "name", "message"),
        rename_fields=_NAMES,
        timestamp="time",
        # The message once more, with a terminal's colours, by the HTTP server.
        reserved_attrs=[*RESERVED_ATTRS, "color_message"],
    )
