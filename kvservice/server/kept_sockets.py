"""Listening sockets that outlive the daemon's process: its keeper has duplicates of them.

A connection that is made while no process serves waits in the queue of such a socket until the next process accepts it.
gRPC cannot be given a socket, so the keeper only has one that is bound to gRPC's TCP port and accepts nothing. It keeps
every other user from the port while no process serves (kvservice.server.listening), and port 0 stands for the same port
in the next process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvservice.kept import KeptFiles

HTTP = "kvservice.http"
FD_PASSING = "kvservice.fds"
GRPC_PORT = "kvservice.grpc"


class KeptSockets:
    def __init__(self, files: KeptFiles) -> None:
        self._files = files
        self._held: dict[str, socket.socket] = {}

    @property
    def is_kept(self) -> bool:
        """Whether there is a keeper."""
        return self._files.is_kept

    def take(self, name: str, is_right: Callable[[socket.socket], bool]) -> socket.socket | None:
        """Return the socket that this process has opened before, or one of an earlier process; or None if there is none
        or it is not the right one."""
        if name in self._held:
            return self._held[name]
        fd = self._files.take(name)
        if fd is None:
            return None
        kept = socket.socket(fileno=fd)
        if is_right(kept):
            self._held[name] = kept
            return kept
        kept.close()
        return None

    def put(self, name: str, opened: socket.socket) -> None:
        """Have the keeper keep the socket, in place of the one of this name."""
        self._files.put(name, opened.fileno())
        self._held[name] = opened

    def drop_unused(self) -> None:
        """Close sockets of an earlier process that this one has not taken, because its configuration is another one.
        Clients would wait for an answer there."""
        names = self._files.names()
        self._files.discard(name for name in names if name in (HTTP, FD_PASSING) or name.startswith(GRPC_PORT))


def is_bound_to(opened: socket.socket, host: str, port: int) -> bool:
    """Return whether the socket is bound to this address. Port 0 is every port."""
    if host == "0.0.0.0" and opened.family == socket.AF_INET6:
        if opened.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
            return False
        host = "::"
    try:
        found = socket.getaddrinfo(host, port, opened.family, socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    bound_host, bound_port = opened.getsockname()[:2]
    return port in (0, bound_port) and bound_host in (address[0] for *_, address in found)
