"""The sockets that the daemon listens on: the unix socket, the fd-passing socket, TCP and HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import grpc

from kvservice.auth import is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError
from kvservice.keeper.settings import MAX_SOCKET_PATH_BYTES
from kvservice.server.fd_passing import FdServer


class ConfigError(KVServiceError):
    """The daemon cannot start with its configuration."""


def check_addresses(config: ServeConfig) -> None:
    """Raise ConfigError if there is no gRPC address, or one that other hosts reach without TLS or authentication."""
    if not (config.unix_socket or config.tcp_address):
        raise ConfigError("there is nothing to listen on: set one of the two", field="unix_socket, tcp_address")
    if not config.tcp_address or config.insecure or is_loopback(config.tcp_address.rpartition(":")[0]):
        return
    missing = []
    if not config.tls_cert:
        missing.append("tls_cert and tls_key")
    if not (config.auth_tokens or config.tls_client_ca):
        missing.append("auth_tokens or tls_client_ca")
    if missing:
        raise ConfigError(
            f"other hosts reach {config.tcp_address}: set {', and '.join(missing)}; "
            "or insecure, if whoever reaches it may use the pool and read what is sent",
            field="tcp_address",
        )


def listen_unix(
    server: grpc.aio.Server, config: ServeConfig, fd_server: FdServer, cleanup: contextlib.ExitStack
) -> None:
    """Bind the unix socket and the fd-passing socket, if there is one, before the server starts. Raises ConfigError."""
    _check_path_lengths(config)
    _bind_unix(server, Path(config.unix_socket), cleanup)
    if config.fd_socket:
        _listen_fds(fd_server, Path(config.fd_socket), int(config.unix_socket_mode, 8), cleanup)


def listen_tcp(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    """Bind host:port before the server starts. The port uses TLS if there are credentials. Returns the address with the
    port that port 0 stands for. Raises ConfigError."""
    return with_port(address, _bind(server, address, "tcp_address", credentials))


def with_port(address: str, port: int) -> str:
    """Return an address host:port with another port."""
    return f"{address.rpartition(':')[0]}:{port}"


def open_unix_socket(config: ServeConfig) -> None:
    """Set the configured file mode of the unix socket, after the server has started."""
    if config.unix_socket:
        os.chmod(config.unix_socket, int(config.unix_socket_mode, 8))


def listen_http(address: str, cleanup: contextlib.ExitStack) -> socket.socket:
    """Return a socket that listens on host:port. Raises ConfigError."""
    try:
        listening = _bound(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}", field="http_address") from None
    cleanup.callback(listening.close)
    listening.listen()
    return listening


def _bound(address: str) -> socket.socket:
    """Return a socket bound to host:port. Raises OSError."""
    host, _, port = address.rpartition(":")
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host.strip("[]"), int(port)))
    except BaseException:
        found.close()
        raise
    return found


def _bind_unix(server: grpc.aio.Server, path: Path, cleanup: contextlib.ExitStack) -> None:
    _check_socket_free(path)
    # Other users must not be able to connect before the mode is set.
    umask = os.umask(0o177)
    try:
        _bind(server, f"unix:{path}", "unix_socket")
    finally:
        os.umask(umask)
    cleanup.callback(path.unlink, missing_ok=True)


def _listen_fds(fd_server: FdServer, path: Path, mode: int, cleanup: contextlib.ExitStack) -> None:
    _check_socket_free(path)
    try:
        fd_server.listen(path, mode)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error}", field="unix_socket") from None
    cleanup.callback(fd_server.close)


def _check_path_lengths(config: ServeConfig) -> None:
    for path in (config.unix_socket, config.fd_socket):
        if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{path} has {length} bytes: the path of a socket has at most {MAX_SOCKET_PATH_BYTES}",
                field="unix_socket",
            )


def _check_socket_free(path: Path) -> None:
    """Raise ConfigError if the path cannot be used. gRPC replaces a socket file that no process serves, so a socket
    that is served must be detected here."""
    if not path.exists():
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is not a directory", field="unix_socket")
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} exists and is not a socket", field="unix_socket")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise ConfigError(f"{path} is served by another process", field="unix_socket")


def _bind(server: grpc.aio.Server, address: str, field: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind the address and return its port, which is 1 for a unix socket. Raises ConfigError."""
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"cannot listen on {address}: {_reason(address)}", field=field)
    return port


def _reason(address: str) -> str:
    """Return why the address cannot be bound. gRPC does not report the reason, so bind it again to get the error."""
    if not address.startswith("unix:"):
        try:
            _bound(address).close()
        except OSError as error:
            return str(error.strerror)
    return "is it in use, and are you allowed to?"
