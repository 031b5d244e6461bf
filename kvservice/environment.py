"""Environment variables that must be set before gRPC is imported and before malloc is first used."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

GRPC_ENVIRONMENT = {
    # gRPC's old poller answers in about half the time of the event engine. Both ends of a connection should use it.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # While no call waits, the old poller looks at a new connection only this often: by default every 5 s, so that a
    # client would use a daemon that has restarted seconds late.
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "200",
    # At lower levels gRPC logs a line for each TLS handshake that fails.
    "GRPC_VERBOSITY": "ERROR",
}
# The daemon logs problems itself. Unauthenticated clients can cause any number of gRPC's own log lines, for example
# one per RPC with too many headers, and could fill the disk.
GRPC_SILENCE = {"GRPC_VERBOSITY": "NONE"}

# Large messages are short-lived. Without these thresholds malloc maps, faults in and unmaps memory for every one.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}

# Limits how often one process can connect to the daemon's unix sockets (csrc/listen/accept.cpp).
PRELOADED = "_ext_accept.so"


def library(name: str) -> Path:
    """Return the path of a library for LD_PRELOAD. It lies beside the extension, which in a development install is not
    beside this package. The extension is not imported: NumPy, which it needs, starts threads."""
    extension = importlib.util.find_spec("kvservice._ext")
    return Path((extension and extension.origin) or __file__).with_name(name)


def prepare_grpc() -> None:
    """Set the variables that gRPC reads when it is imported, unless the user has set them."""
    for name, value in GRPC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def missing_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not set but that a process with large messages needs. They must be set before exec,
    because malloc reads them only then."""
    wanted = GRPC_ENVIRONMENT | GRPC_SILENCE | MALLOC_ENVIRONMENT
    return {name: value for name, value in wanted.items() if name not in environ}


def missing_of_daemon(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are to be set before a daemon is executed: it has a preloaded library besides."""
    missing, path = missing_environment(environ), library(PRELOADED)
    preloaded = [name for name in environ.get("LD_PRELOAD", "").split(":") if name]
    # The dynamic linker splits the variable at these characters.
    if path.exists() and not {" ", ":"}.intersection(str(path)) and str(path) not in preloaded:
        missing["LD_PRELOAD"] = ":".join((*preloaded, str(path)))
    return missing
