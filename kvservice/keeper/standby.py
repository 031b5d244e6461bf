"""The start of a process that is to take over from a running daemon: what it says before, and the signal to go.

keeper                          standby process                old daemon
start, duplicates of the
descriptors           ────────▶ imports, checks the state      serves
                      ◀──────── ready, or refused: why
SIGUSR1               ───────────────────────────────────────▶ drains, saves its steps, ends with status 0
go, the newest
descriptors           ────────▶ opens the state, serves
                      ◀──────── READY=1
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping

from kvservice.keeper.notify import Notifier

# Its value is the descriptor of the socket on which the process gets the signal to go.
STANDBY_VARIABLE = "KVSERVICE_STANDBY"
STANDBY_READY = "ready"
# The key of the assignment that says STANDBY_READY, or why the process cannot take over.
STANDBY_SAYS = "X_KVSERVICE_STANDBY"
MAX_REASON_CHARACTERS = 1000
_MAX_GO_BYTES = 1 << 16
_MAX_DESCRIPTORS = 253  # the kernel's limit for one message


class Standby:
    """The side of the process that takes over."""

    def __init__(self, channel: socket.socket, notifier: Notifier) -> None:
        self._channel, self._notifier = channel, notifier

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Standby | None:
        """Return the standby if a keeper has started this process as one, else None. The variable that says so is
        removed from `environ`. Raises ValueError and OSError if the variables are wrong."""
        number = environ.pop(STANDBY_VARIABLE, "")
        notifier = Notifier.from_environment(environ) if number else None
        if notifier is None:
            return None
        channel = socket.socket(fileno=int(number))
        channel.set_inheritable(False)
        return cls(channel, notifier)

    def refuse(self, reason: str) -> None:
        """Say why this process cannot take over. The old daemon goes on serving, and this process must end."""
        self._say(" ".join(reason.split())[:MAX_REASON_CHARACTERS] or "no reason given")

    def wait_for_go(self, environ: MutableMapping[str, str] = os.environ) -> dict[str, int]:
        """Say that this process can take over, and wait until the old daemon has ended. Returns the descriptors that
        the keeper holds now, by name; the caller owns them.

        The variables about the end of the old daemon are set in `environ`. Raises EOFError if the keeper has given the
        upgrade up.
        """
        self._say(STANDBY_READY)
        data, descriptors, _, _ = socket.recv_fds(
            self._channel, _MAX_GO_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            raise EOFError("the keeper has given the upgrade up")
        go = json.loads(data)
        environ.update(go["environ"])
        self._channel.close()
        self._notifier.close()
        return dict(zip(go["names"], descriptors, strict=True))

    def _say(self, text: str) -> None:
        self._notifier.send(f"{STANDBY_SAYS}={text}")


def send_go(channel: socket.socket, descriptors: Mapping[str, int], environ: Mapping[str, str]) -> None:
    """Tell the process on the other end that the old daemon has ended. Raises OSError if that process has ended."""
    message = json.dumps({"names": [*descriptors], "environ": dict(environ)}).encode()
    socket.send_fds(channel, [message], [*descriptors.values()])
