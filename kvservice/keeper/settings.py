"""The settings that `kvservice serve` passes to the keeper, which it executes in its own place."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

# Longest path of a unix socket; Linux's sun_path has one byte more, for the terminating zero.
MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True)
class KeeperSettings:
    """`command` starts the daemon. `control_path` is the path of the control socket, or empty for none.

    `drain_s` is how long a daemon that hands over may drain. `log_level` and `log_format` are those of
    the daemon.
    """

    command: Sequence[str]
    control_path: str
    drain_s: float
    log_level: str
    log_format: str

    @classmethod
    def from_json(cls, text: str) -> KeeperSettings:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)


def control_path(unix_socket: str) -> str:
    """Return the path of the control socket beside the daemon's unix socket, or empty if there can be none."""
    return _beside(unix_socket, "keeper")


def door_path(unix_socket: str) -> str:
    """Return the path of the operator's door, the daemon's second gRPC socket, beside its unix socket, or empty if
    there can be none."""
    return _beside(unix_socket, "own")


def _beside(unix_socket: str, ending: str) -> str:
    path = f"{unix_socket}.{ending}"
    return path if unix_socket and len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else ""


def become_keeper(settings: KeeperSettings, environ: Mapping[str, str]) -> NoReturn:
    """Execute the keeper in place of this process. Its daemon gets the variables `environ`."""
    # -P keeps a checkout in the working directory from shadowing the installed package.
    arguments = [sys.executable, "-P", "-m", "kvservice.keeper", settings.to_json()]
    os.execve(sys.executable, arguments, dict(environ))
