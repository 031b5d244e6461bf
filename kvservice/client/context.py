"""The context of a session, from which transports and mapped pools are made."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.client.connection import SessionConnection
from kvservice.client.fd_passing import FdPassing
from kvservice.client.regions import RegionTable
from kvservice.client.remote import RemoteRegions
from kvservice.client.values import PoolInfo


@dataclass(frozen=True, slots=True)
class Context:
    """The connection of a session with what it shares: regions of this host and for another one, and the socket for
    file descriptors."""

    info: PoolInfo
    connection: SessionConnection
    fds: FdPassing
    regions: RegionTable
    remote: RemoteRegions

    @staticmethod
    def of(
        info: PoolInfo, connection: SessionConnection, fd_path: str | None, token: bytes, *, transfers: bool = False
    ) -> Context:
        """`fd_path` is the path of the daemon's fd-passing socket, None unless the client uses a unix socket. `token`
        is the session's. `transfers` is whether the session may use a Transfer Engine."""
        shares = info.allow_client_shm or info.share_pool != "off"
        fds = FdPassing(connection, fd_path if shares else None, token)
        protocol = info.transfer_protocol if transfers else ""
        remote = RemoteRegions(connection, connection.lock(), protocol, info.transfer_address, block_bytes=0)
        return Context(info, connection, fds, RegionTable(connection, fds), remote)
