"""The sockets that the daemon listens on (unix, fd passing, TCP and HTTP), also those that a keeper holds, and the
limit on open files."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc

from kvservice.auth import is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError, reason_of
from kvservice.keeper.private_paths import (
    MAX_SOCKET_PATH_BYTES,
    beside,
    check_unused,
    listen_at,
    put_in_place,
    refuse_descriptors,
)
from kvservice.kept import KeptFiles
from kvservice.server.memory.fd_passing import BACKLOG, MAX_OFFERS_OF_SESSION, MAX_WRITERS, FdServer
from kvservice.server.rpc.peers import own_sockets
from kvservice.server.rpc.slots import DOOR_CONNECTIONS


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
) -> str:
    """Bind the unix socket and the fd-passing socket, if there is one, before the server starts. Their paths stay, for
    the next process. Returns the path to which the unix socket was bound before it was moved. Raises ConfigError."""
    _check_path_lengths(config)
    mode = int(config.unix_socket_mode, 8)
    if config.fd_socket:
        cleanup.callback(fd_server.close)
        fd_server.listen(fd_listener(Path(config.fd_socket), mode, kept))
    return _bind_unix(server, config.unix_socket, mode)


def listen_door(server: grpc.aio.Server, path: str) -> None:
    """Bind the operator's door, to which only the daemon's own user and root can connect. Raises ConfigError."""
    _bind_unix(server, path, 0o600)


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
    """Bind a socket that accepts nothing to host:port, and return the port. If the host is a name of several addresses,
    each is bound. Raises ConfigError if any other process has the port."""
    host, port = _host_and_port(address)
    for number, (family, numeric) in enumerate(_addresses(host, "tcp_address")):
        name = f"{GRPC_PORT}.{number}" if number else GRPC_PORT
        reserving = kept.take(name, functools.partial(is_bound_to, host=numeric, port=port))
        if reserving is None:
            try:
                reserving = _reserve(family, numeric, port)
            except OSError as error:
                raise ConfigError(f"cannot listen on {address}: {error.strerror}", field="tcp_address") from None
            kept.put(name, reserving)
        cleanup.callback(reserving.close)
        port = int(reserving.getsockname()[1])
    return port


def _reserve(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """Return a socket that holds host:port, beside which sockets of the daemon's user with SO_REUSEPORT, as gRPC's, can
    listen, and those of no other user. Raises OSError if any other socket holds the port.

    Without SO_REUSEADDR, connections of an earlier daemon would keep it from binding for a minute; with it, others
    could bind the port while nobody listens. So it has the option while it listens itself, which only one socket can,
    and not afterwards.
    """
    reserving = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            reserving.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
        reserving.bind((host, port))
        if port:
            reserving.listen()
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if port:
            reserving.shutdown(socket.SHUT_RDWR)
    except OSError:
        reserving.close()
        raise
    return reserving


def _addresses(host: str, field: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses on which gRPC listens for a host. Raises ConfigError."""
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        return [(socket.AF_INET6, "::")]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", field=field) from None
    usable = socket.has_dualstack_ipv6()
    return [(family, str(address[0])) for family, *_, address in found if family == socket.AF_INET or usable]


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


def _bind_unix(server: grpc.aio.Server, path: str, mode: int) -> str:
    """Bind a path in the same folder, and move the socket to its path. Returns the first path. Raises ConfigError."""
    made = beside(path)
    # Other users must not be able to connect before the mode is set.
    umask = os.umask(0o177)
    try:
        check_unused(path)
        _bind(server, f"unix:{made}", "unix_socket")
        for _, opened in own_sockets():
            with opened:
                if opened.family == socket.AF_UNIX and opened.getsockname() == made:
                    refuse_descriptors(opened)
        os.chmod(made, mode)
        put_in_place(made, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise _no_path(path, error) from None
    finally:
        os.umask(umask)
    return made


def _no_path(path: str, error: OSError) -> ConfigError:
    folder = Path(path).parent
    reason = reason_of(error) if folder.is_dir() else f"{folder} is not a directory"
    return ConfigError(f"cannot listen on {path}: {reason}", field="unix_socket")


def fd_listener(path: Path, mode: int, kept: KeptSockets) -> socket.socket:
    """Return the socket that listens at the path of the fd-passing socket. Raises ConfigError.

    The socket of an earlier process is right if it is still the one at its path.
    """
    listening = kept.take(FD_PASSING, lambda found: _is_at(found, path))
    try:
        if listening is None:
            listening = listen_at(str(path), BACKLOG, mode)
            kept.put(FD_PASSING, listening)
        refuse_descriptors(listening)  # that of an earlier version may get some
        os.chmod(path, mode)
    except OSError as error:
        raise _no_path(str(path), error) from None
    listening.setblocking(False)
    return listening


def _is_at(listening: socket.socket, path: Path) -> bool:
    """Return whether connections to the path arrive at this socket, and not at another one that was put there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # its queue is full of clients
            return True
        except OSError:
            return False
        return bool(probe.getpeername() == listening.getsockname())


def _check_path_lengths(config: ServeConfig) -> None:
    for path in (config.unix_socket, config.fd_socket):
        if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{path} has {length} bytes: the path of a socket has at most {MAX_SOCKET_PATH_BYTES}",
                field="unix_socket",
            )


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
# it. gRPC cannot be given a socket, so the keeper only has one that is bound to gRPC's TCP port and accepts nothing. It
# keeps every other user from the port while no process serves, and port 0 stands for the same port in the next process.

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
    if config.unix_socket:
        needed["max_connections"] += DOOR_CONNECTIONS
    if config.allow_client_shm != "off":
        needed["max_lanes"] = _OF_LANE * config.max_lanes
        needed["max_regions"] = _OF_REGION * config.max_regions * config.max_sessions
    if config.transfer_address:
        needed["max_transfers"] = _OF_TRANSFER * config.max_transfers
    if config.share_pool != "off":
        needed["max_pool_mappings"] = _OF_MAPPING * config.max_pool_mappings
    if config.share_pool == "write":
        needed["max_pool_mappings"] += MAX_WRITERS
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
