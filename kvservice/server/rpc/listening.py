"""The sockets that the daemon listens on: the unix socket, the fd-passing socket, TCP and HTTP; descriptors for all."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc

from kvservice.auth import is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError, reason_of
from kvservice.keeper.settings import MAX_SOCKET_PATH_BYTES
from kvservice.kept import KeptFiles
from kvservice.server.memory.fd_passing import BACKLOG, MAX_OFFERS_OF_SESSION, FdServer
from kvservice.server.tiering.store import MAX_WRITERS


class ConfigError(KVServiceError):
    """The daemon cannot start with its configuration."""


def check_addresses(config: ServeConfig) -> None:
    """Raise ConfigError if there is no gRPC address, or one that other hosts reach without TLS or authentication, or
    if transfer_address is of no use."""
    if not (config.unix_socket or config.tcp_address):
        raise ConfigError("there is nothing to listen on: set one of the two", field="unix_socket, tcp_address")
    if config.transfer_address:
        _check_transfer_address(config)
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


def _check_transfer_address(config: ServeConfig) -> None:
    if not config.tcp_address:
        raise ConfigError("is for clients over TCP: set tcp_address", field="transfer_address")
    if not (config.transfer_insecure or is_loopback(config.transfer_address)):
        raise ConfigError(
            f"bytes from {config.transfer_address} travel without TLS and tokens: set transfer_insecure, if the "
            "network is trusted",
            field="transfer_address",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((config.transfer_address, 0))
        except OSError as error:
            raise ConfigError(
                f"no interface of this host has {config.transfer_address}: {error.strerror}", field="transfer_address"
            ) from None


def check_free(config: ServeConfig, kept: Mapping[str, int]) -> None:
    """Raise ConfigError if this process could not listen, although the one whose descriptors are `kept` ends before.
    Only addresses that this one does not have can be tried."""
    if config.unix_socket and not (parent := Path(config.unix_socket).parent).is_dir():
        raise ConfigError(f"{parent} is not a directory", field="unix_socket")
    for name, field in ((HTTP, "http_address"), (GRPC_PORT, "tcp_address")):
        address = getattr(config, field)
        if address and not _is_kept(kept.get(name), address):
            _bound(address, field).close()


def _is_kept(descriptor: int | None, address: str) -> bool:
    if descriptor is None:
        return False
    with socket.socket(fileno=os.dup(descriptor)) as kept:
        return is_bound_to(kept, *_host_and_port(address))


def listen_unix(
    server: grpc.aio.Server, config: ServeConfig, fd_server: FdServer, kept: KeptSockets, cleanup: contextlib.ExitStack
) -> None:
    """Bind the unix socket and the fd-passing socket, if there is one, before the server starts. Raises ConfigError."""
    _check_path_lengths(config)
    _bind_unix(server, Path(config.unix_socket), cleanup)
    if config.fd_socket:
        path = Path(config.fd_socket)
        cleanup.callback(fd_server.close)
        fd_server.listen(fd_listener(path, int(config.unix_socket_mode, 8), kept), path)


def listen_tcp(
    server: grpc.aio.Server,
    address: str,
    credentials: grpc.ServerCredentials | None,
    kept: KeptSockets,
    cleanup: contextlib.ExitStack,
) -> str:
    """Bind host:port before the server starts. The port uses TLS if there are credentials. Returns the address with the
    port that port 0 stands for. Raises ConfigError."""
    if kept.is_kept:
        address = with_port(address, reserve_port(address, kept, cleanup))
    return with_port(address, _bind(server, address, "tcp_address", credentials))


def with_port(address: str, port: int) -> str:
    """Return an address host:port with another port."""
    return f"{address.rpartition(':')[0]}:{port}"


def open_unix_socket(config: ServeConfig) -> None:
    """Set the configured file mode of the unix socket, after the server has started."""
    if config.unix_socket:
        os.chmod(config.unix_socket, int(config.unix_socket_mode, 8))


def listen_http(address: str, kept: KeptSockets, cleanup: contextlib.ExitStack) -> socket.socket:
    """Return a socket that listens on host:port. Raises ConfigError."""
    listening = kept.take(HTTP, lambda found: is_bound_to(found, *_host_and_port(address)))
    if listening is None:
        listening = _bound(address, "http_address")
        listening.listen()
        kept.put(HTTP, listening)
    cleanup.callback(listening.close)
    return listening


def reserve_port(address: str, kept: KeptSockets, cleanup: contextlib.ExitStack) -> int:
    """Bind a socket that never listens to host:port, and return the port. Raises ConfigError.

    It has SO_REUSEADDR, as gRPC's socket does: Linux then lets gRPC bind the same port and listen there, but no second
    daemon afterwards.
    """
    reserving = kept.take(GRPC_PORT, lambda found: is_bound_to(found, *_host_and_port(address)))
    if reserving is None:
        reserving = _bound(address, "tcp_address")
        kept.put(GRPC_PORT, reserving)
    cleanup.callback(reserving.close)
    return int(reserving.getsockname()[1])


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bound(address: str, field: str) -> socket.socket:
    """Return a socket bound to host:port. Raises ConfigError."""
    host, port = _host_and_port(address)
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(f"cannot listen on {address}: {error.strerror}", field=field) from None
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


def fd_listener(path: Path, mode: int, kept: KeptSockets) -> socket.socket:
    """Return the socket that listens at the path of the fd-passing socket. Raises ConfigError.

    The socket of an earlier process is right if its path is still there. The path belongs to this daemon, as the path
    of the gRPC socket does, which no other process serves.
    """
    listening = kept.take(FD_PASSING, lambda found: found.getsockname() == str(path) and path.is_socket())
    try:
        if listening is None:
            _check_socket_free(path)
            listening = _bound_unix(path)
            kept.put(FD_PASSING, listening)
        os.chmod(path, mode)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {reason_of(error)}", field="unix_socket") from None
    listening.setblocking(False)
    return listening


def _bound_unix(path: Path) -> socket.socket:
    """Return a socket that listens at a path that no process serves, to which only this user can connect. Raises
    OSError."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        listening.bind(str(path))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(umask)
    return listening


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
        host, port = _host_and_port(address)
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            return str(error.strerror)
    return "is it in use, and are you allowed to?"


# ---- listening sockets that outlive the daemon's process: its keeper has duplicates of them
#
# A connection that is made while no process serves waits in the queue of such a socket until the next process accepts
# it. gRPC cannot be given a socket, so the keeper only has one that is bound to gRPC's TCP port and never listens. It
# makes sure that port 0 stands for the same port in the next process.

HTTP = "kvservice.http"
FD_PASSING = "kvservice.fds"
GRPC_PORT = "kvservice.grpc"


class KeptSockets:
    def __init__(self, files: KeptFiles) -> None:
        self._files = files

    @property
    def is_kept(self) -> bool:
        """Whether there is a keeper."""
        return self._files.is_kept

    def take(self, name: str, is_right: Callable[[socket.socket], bool]) -> socket.socket | None:
        """Return the socket of an earlier process, or None if there is none or it is not the right one."""
        fd = self._files.take(name)
        if fd is None:
            return None
        kept = socket.socket(fileno=fd)
        if is_right(kept):
            return kept
        kept.close()
        return None

    def put(self, name: str, opened: socket.socket) -> None:
        """Have the keeper keep the socket, in place of the one of this name."""
        self._files.put(name, opened.fileno())

    def drop_unused(self) -> None:
        """Close sockets of an earlier process that this one has not taken, because its configuration is another one.
        Clients would wait for an answer there."""
        self._files.discard(self._files.names() & {HTTP, FD_PASSING, GRPC_PORT})


def is_bound_to(opened: socket.socket, host: str, port: int) -> bool:
    """Return whether the socket is bound to this address. Port 0 is every port."""
    try:
        found = socket.getaddrinfo(host, port, opened.family, socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    bound_host, bound_port = opened.getsockname()[:2]
    return port in (0, bound_port) and bound_host in (address[0] for *_, address in found)


# ---- the limit on file descriptors: the daemon starts only if it suffices for the configuration

logger = logging.getLogger(__name__)

# Descriptors of the daemon itself: its memory, the observer, the event loop, gRPC, logs, and a margin.
_BASE = 128
# Open descriptors per lane, pool mapping and region, including those offered on the fd-passing socket.
_OF_LANE, _OF_MAPPING, _OF_REGION = 4, 4, 3
# Open descriptors per remote region: its memory, the socket of its engine, and those of its start.
_OF_TRANSFER = 8
# The offers of the store that a session may have pending.
_OF_STORE = MAX_OFFERS_OF_SESSION
# Connections to the fd-passing socket.
_HANDOVER = 64


def needed_files(config: ServeConfig) -> dict[str, int]:
    """Return the number of file descriptors that the daemon may need, by the option that determines it."""
    addresses = bool(config.unix_socket) + bool(config.tcp_address)
    needed = {"max_connections": _BASE + config.connection_limit * addresses}
    if config.fd_socket:
        needed["max_connections"] += _HANDOVER
    if config.allow_client_shm != "off":
        needed["max_lanes"] = _OF_LANE * config.max_lanes
        needed["max_regions"] = _OF_REGION * config.max_regions * config.max_sessions
    if config.transfer_address:
        needed["max_transfers"] = _OF_TRANSFER * config.max_transfers
    if config.share_pool != "off":
        needed["max_pool_mappings"] = _OF_MAPPING * config.max_pool_mappings
    if config.shares_store != "off":
        needed["share_store"] = _OF_STORE * config.max_sessions
    if config.shares_store in ("auto", "write"):
        needed["share_store"] += MAX_WRITERS
    return needed


def raise_file_limit(config: ServeConfig) -> None:
    """Set the soft limit on file descriptors to the hard limit. Raises ConfigError, with the numbers, if the hard limit
    is below what the configuration needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.info("the limit on file descriptors is raised from %d to %d", soft, hard)
    needed = needed_files(config)
    total = sum(needed.values())
    if hard != resource.RLIM_INFINITY and hard < total:
        parts = ", ".join(f"{count} for {option}" for option, count in needed.items())
        raise ConfigError(
            f"the daemon may need {total} file descriptors ({parts}), and the hard limit is {hard} (ulimit -Hn)",
            field=max(needed, key=lambda option: needed[option]),
        )
