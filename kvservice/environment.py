"""What has to be in a process's environment before gRPC is imported, and before malloc is first used."""

from __future__ import annotations

import os
from collections.abc import Mapping

GRPC_ENVIRONMENT = {
    # gRPC's older poller answers in about half the time of the event engine. Both sides of a connection want it.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    # Below that level gRPC writes a line for each TLS handshake that fails.
    "GRPC_VERBOSITY": "ERROR",
}
# The daemon says itself what is wrong. The rest of gRPC's lines a stranger can cause as often as it likes, one with
# each RPC that has too many headers, and so fill a disk.
GRPC_SILENCE = {"GRPC_VERBOSITY": "NONE"}

# Large messages live shortly: without these every one is mapped, faulted in page by page, and unmapped.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


def prepare_grpc() -> None:
    """Set what gRPC reads at its import, unless the user has set it."""
    for name, value in GRPC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def missing_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process that is to exchange large messages lacks; malloc reads it only at exec."""
    wanted = GRPC_ENVIRONMENT | GRPC_SILENCE | MALLOC_ENVIRONMENT
    return {name: value for name, value in wanted.items() if name not in environ}
