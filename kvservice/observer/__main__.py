"""Started by the daemon with descriptors: of its memory, of the links to ask and to answer by, of the HTTP socket."""

from __future__ import annotations

import os
import socket
import sys

import uvloop

from kvservice.observer.process import Observer

NICENESS = 10


def main() -> None:
    memory, *sockets = map(int, sys.argv[1:])
    asking, answering, *http = (socket.socket(fileno=fd) for fd in sockets)
    os.nice(NICENESS)  # whoever waits for K/V goes first
    uvloop.run(Observer(memory, asking, answering, http[0] if http else None).run())


main()
