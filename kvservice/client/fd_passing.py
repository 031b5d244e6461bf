"""The client's side of fd passing: it exchanges a token for file descriptors, and proves who owns a session."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from kvservice.client.connection import SessionConnection
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


class FdPassing:
    """The fd-passing socket of the daemon, for one session.

    `path` is None unless the client uses a unix socket and the daemon shares memory.
    """

    def __init__(self, connection: SessionConnection, path: str | None, session_token: bytes) -> None:
        self._connection, self._session_token = connection, session_token
        self.path = path
        # The number of restarts at which the daemon was told which user owns the session. Each process is told.
        self._introduced_at: int | None = None

    async def introduce(self) -> bytes:
        """Prove to the daemon which user owns the session. Returns a token that proves it in one call, or b"" if the
        daemon shares no memory. Raises the errors of `introduce` below."""
        if self.path is None:
            return b""
        num_restarts = self._connection.num_restarts
        token: bytes = await self._connection.run(introduce, self.path, self._session_token)
        self._introduced_at = num_restarts
        return token

    async def introduce_once(self) -> None:
        """Call `introduce` unless that has been done. The daemon requires it before it shares memory with the
        session."""
        if self._introduced_at != self._connection.num_restarts:
            await self.introduce()

    async def fetch(self, token: bytes, count: int) -> list[int]:
        """Receive the file descriptors for a token; the caller closes them. Raises the errors of `fetch` below."""
        if self.path is None:
            raise RegionsNotAllowedError("shared memory is for clients on the unix socket")
        descriptors: list[int] = await self._connection.run(fetch, self.path, token, count)
        return descriptors


def fetch(path: str, token: bytes, count: int) -> list[int]:
    """Receive the `count` file descriptors for a token. The caller closes them.

    Raises RegionsNotAllowedError if the daemon refuses to pass them to this process, ResourceExhaustedError if one of
    the two has no descriptor left, ConnectionLostError if it cannot be reached.
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
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceExhaustedError("this process has no file descriptor left") from None
        raise ConnectionLostError(f"{path}: {error.strerror or error}") from None


def _refused(answer: bytes = b"") -> KVServiceError:
    if answer == EXHAUSTED:
        return ResourceExhaustedError("the daemon has no file descriptor left")
    return RegionsNotAllowedError(
        f"the daemon hands nothing over to user {os.geteuid()} (allow_client_shm, trusted_uids), or not for this token"
    )


def _receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive a byte and descriptors. Unlike socket.recv_fds, this sets close-on-exec on them. Raises
    ResourceExhaustedError if this process has no room for them."""
    numbers = array.array("i")
    room = socket.CMSG_LEN(count * numbers.itemsize)
    answer, messages, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    if flags & socket.MSG_CTRUNC:
        for descriptor in numbers:
            os.close(descriptor)
        raise ResourceExhaustedError("this process has no file descriptor left")
    return answer, numbers.tolist()
