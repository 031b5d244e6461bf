"""The client's side of fd passing: it exchanges a token for file descriptors, and proves who owns a session."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator

from kvservice.errors import ConnectionLostError, KVServiceError, RegionsNotAllowedError, ResourceExhaustedError

TOKEN_BYTES = 16
# The daemon sends this byte instead of an answer if it has no file descriptor left.
EXHAUSTED = b"\1"
_UNIX = "unix:"
_TIMEOUT_S = 10.0


def socket_path(address: str) -> str | None:
    """Return the path of the fd-passing socket for a gRPC address, or None if the address is not a unix socket."""
    if not address.startswith(_UNIX):
        return None
    path = address.removeprefix(_UNIX)
    return f"{path.removeprefix('//')}.fds"


def fetch(path: str, token: bytes, count: int) -> list[int]:
    """Receive the `count` file descriptors for a token. The caller closes them.

    Raises RegionsNotAllowedError if the daemon refuses to pass them to this process, ResourceExhaustedError if it has
    no descriptor left, ConnectionLostError if it cannot be reached.
    """
    with _presented(path, token) as connection:
        answer, descriptors = _receive(connection, count)
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise _refused(answer)
    return descriptors


def introduce(path: str, session_token: bytes) -> bytes:
    """Prove to the daemon that a session belongs to this user. Returns a token that proves it in one call. Raises the
    errors of `fetch`."""
    with _presented(path, session_token) as connection:
        token = connection.recv(TOKEN_BYTES)
    if len(token) != TOKEN_BYTES:
        raise _refused(token)
    return token


@contextlib.contextmanager
def _presented(path: str, token: bytes) -> Iterator[socket.socket]:
    """Connect to the socket and send the token."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(path)
            with contextlib.suppress(BrokenPipeError):  # a daemon that refuses may not read, but may send the reason
                connection.sendall(token)
            yield connection
    except ConnectionResetError:
        raise _refused() from None
    except OSError as error:
        raise ConnectionLostError(f"{path}: {error.strerror or error}") from None


def _refused(answer: bytes = b"") -> KVServiceError:
    if answer == EXHAUSTED:
        return ResourceExhaustedError("the daemon has no file descriptor left")
    return RegionsNotAllowedError(
        f"the daemon hands nothing over to user {os.geteuid()} (allow_client_shm, trusted_uids), or not for this token"
    )


def _receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive a byte and descriptors. Unlike socket.recv_fds, this sets close-on-exec on them."""
    numbers = array.array("i")
    room = socket.CMSG_LEN(count * numbers.itemsize)
    answer, messages, _, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return answer, numbers.tolist()
