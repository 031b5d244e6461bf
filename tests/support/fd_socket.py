"""The client's side of the fd-passing socket, without the client library: a token is sent, and answered."""

from __future__ import annotations

import socket

TOKEN_BYTES = 16


def path_of(address: str) -> str:
    """Return the path of the fd-passing socket of the daemon at this unix socket."""
    return f"{address.removeprefix('unix:').removeprefix('//')}.fds"


def introduce(path: str, session_token: bytes) -> bytes:
    """Say whose session it is. Returns the token that proves it in one call, or b"" if the daemon refuses."""
    return ask(path, session_token, TOKEN_BYTES, 0)[0]


def fetch(path: str, token: bytes, count: int = 1) -> list[int]:
    """Return the file descriptors of a token, which the caller closes; none if the daemon refuses."""
    return ask(path, token, 1, count)[1]


def ask(path: str, sent: bytes, num_bytes: int, num_descriptors: int) -> tuple[bytes, list[int]]:
    """Send some bytes. Returns what the daemon answers, nothing if it closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            data, descriptors, _, _ = socket.recv_fds(connection, num_bytes, num_descriptors)
        except (BrokenPipeError, ConnectionResetError):  # closed with unread bytes
            return b"", []
        return data, descriptors
