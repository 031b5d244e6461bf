"""Where the daemon listens: the unix socket and its handover socket, TCP, HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import grpc

from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError
from kvservice.server.handover import Handover


class StartError(KVServiceError):
    """The daemon cannot start as it is configured."""


def listen(server: grpc.aio.Server, handover: Handover, config: ServeConfig, cleanup: contextlib.ExitStack) -> None:
    """Bind the configured gRPC addresses, before the server starts. Raises StartError."""
    if not (config.unix_socket or config.tcp_address):
        raise StartError("there is nothing to listen on: set one of the two", field="unix_socket, tcp_address")
    if config.unix_socket:
        _listen_unix(server, Path(config.unix_socket), cleanup)
    if config.handover_socket:
        _listen_handover(handover, Path(config.handover_socket), int(config.unix_socket_mode, 8), cleanup)
    if config.tcp_address:
        _bind(server, config.tcp_address, "tcp_address")


def open_unix_socket(config: ServeConfig) -> None:
    """Give the unix socket its configured mode, after the server has started."""
    if config.unix_socket:
        os.chmod(config.unix_socket, int(config.unix_socket_mode, 8))


def listen_http(address: str, cleanup: contextlib.ExitStack) -> socket.socket:
    """A socket that listens at host:port. Raises StartError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error}", field="http_address") from None
    cleanup.callback(listening.close)
    return listening


def _listen_unix(server: grpc.aio.Server, path: Path, cleanup: contextlib.ExitStack) -> None:
    _check_socket_free(path)
    # The socket must not be open to others until its mode is set.
    umask = os.umask(0o177)
    try:
        _bind(server, f"unix:{path}", "unix_socket")
    finally:
        os.umask(umask)
    cleanup.callback(path.unlink, missing_ok=True)


def _listen_handover(handover: Handover, path: Path, mode: int, cleanup: contextlib.ExitStack) -> None:
    _check_socket_free(path)
    try:
        handover.listen(path, mode)
    except OSError as error:
        raise StartError(f"cannot listen on {path}: {error}", field="unix_socket") from None
    cleanup.callback(handover.close)


def _check_socket_free(path: Path) -> None:
    """gRPC removes a socket file that nobody serves; one that is served must stay. Raises StartError."""
    if not path.exists():
        if not path.parent.is_dir():
            raise StartError(f"{path.parent} is not a directory", field="unix_socket")
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise StartError(f"{path} exists and is no socket", field="unix_socket")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise StartError(f"{path} is served by another process", field="unix_socket")


def _bind(server: grpc.aio.Server, address: str, field: str) -> None:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise StartError(f"cannot listen on {address}: is it in use, and are you allowed to?", field=field)
