"""Entry point of the observer. The daemon passes descriptors: its memory, two links (requests to the daemon, requests
from the daemon) and the HTTP socket."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

NICENESS = 10


def main() -> None:
    os.nice(NICENESS)  # the daemon and its clients have priority, over the imports too
    import uvloop

    from kvservice.observer.process import Observer

    memory, *sockets = map(int, sys.argv[1:])
    asking, answering, *http = (socket.socket(fileno=fd) for fd in sockets)
    with contextlib.suppress(ConnectionError):  # the daemon ended before it had configured its observer
        uvloop.run(Observer(memory, asking, answering, http[0] if http else None).run())


main()
