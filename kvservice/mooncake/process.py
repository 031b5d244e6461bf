"""A child process that fails as a whole."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Final

# The library's own variable: whoever sets it wants to read the library's log.
_LOG_LEVEL: Final = "MC_LOG_LEVEL"


def begin() -> None:
    """Prepare this process, before it has threads.

    It ends when one of its threads fails, because a request would have no reply. The library writes to its log for each
    value that fails, so its log is dropped unless someone wants it.
    """
    threading.excepthook = _end
    if _LOG_LEVEL not in os.environ:
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)


def _end(failure: threading.ExceptHookArgs) -> None:
    kind: type[BaseException] = failure.exc_type
    trace: TracebackType | None = failure.exc_traceback
    traceback.print_exception(kind, failure.exc_value, trace)
    os._exit(1)
