"""Mooncake's library. Import this module in a process of its own only."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, Final

from kvservice.mooncake import MooncakeOptions, check_listening

# ---- a child process that fails as a whole


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


# ---- the library


OBJECT_NOT_FOUND: Final = -704
OBJECT_ALREADY_EXISTS: Final = -705
NO_ROOM: Final = frozenset({-200, -101, -1700})
# The codes of calls that did not reach the master, or that it refuses all.
_NO_MASTER: Final = frozenset({-900, -901, -103, -1010})
# The time limit on the first connection to the master.
_CONNECT_S: Final = 3.0
# Time limits are in milliseconds, and shorter than those of the daemon on its requests, so that a master or a node that
# hangs does not cost the client process its life. The queues of transfers to a node have room for all that the daemon
# requests at a time: what finds no place there, or waits for longer, fails.
_VARIABLES: Final = {
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "15000",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}


class MooncakeError(Exception):
    """A call of the library failed as a whole."""


class NoMasterError(MooncakeError):
    """Nobody listens at the address of the master."""


def join(options: MooncakeOptions, address: str, segment_bytes: int) -> Any:
    """Join a store, and give it `segment_bytes` of memory. `address` is where this process may listen. Returns the
    library's client. Raises NoMasterError, MooncakeError, ListeningError."""
    _check_master(options.master)
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise MooncakeError(f"Mooncake's library cannot be imported: {error}") from None
    # Values travel from and to registered memory, so the library needs no buffer of its own.
    code = store.setup(
        options.address, options.metadata, segment_bytes, 0, options.protocol, options.device, options.master
    )
    if code:
        raise MooncakeError(f"the store of master {options.master} cannot be joined (code {code})")
    check_listening(address)
    return store


def _check_master(master: str) -> None:
    """Raise NoMasterError unless a process listens there. The library would try for a minute."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise NoMasterError(f"the master {master} cannot be reached: {error}") from None


def check_codes(codes: list[int]) -> list[int]:
    """Return the codes. Raises MooncakeError if all of them say that the master does not answer."""
    if codes and all(code in _NO_MASTER for code in codes):
        raise MooncakeError(f"the master does not answer (code {codes[0]})")
    return codes
