"""The interface to one daemon of a cluster, which the sync and the async API implement."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

from grpc_health.v1 import health_pb2

from kvservice.auth.client import TLSOption
from kvservice.client.cluster.placement import Load
from kvservice.client.events import KVEventBatch
from kvservice.client.sequences import ExtraKeys
from kvservice.client.values import PoolInfo, from_message
from kvservice.errors import (
    CallTimeoutError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from kvservice.v1 import pool_pb2
from kvservice.wire.status import HEALTH_REASON

ClientT = TypeVar("ClientT", covariant=True)

# The name of the session in which a cluster asks MatchPrefix.
CONTROL_SESSION = "cluster"
# Errors after which that session can still be used.
SESSION_STAYS = (CallTimeoutError, ResourceExhaustedError, InvalidArgumentError)

# The fields that all daemons of a cluster have in common: a block of one has the meaning and the size of the others'.
SHAPE_FIELDS = ("num_layers", "num_kv_heads", "head_size", "dtype", "block_size", "block_bytes", "kv_cache_dtype")


class DaemonReport(NamedTuple):
    """A daemon that serves: its pool and its load."""

    info: PoolInfo
    load: Load

    @property
    def shape(self) -> dict[str, Any]:
        return {name: getattr(self.info, name) for name in SHAPE_FIELDS}


class DaemonLink(Protocol[ClientT]):
    """The connections of a cluster to one daemon. All methods raise KVServiceError."""

    @property
    def client(self) -> ClientT:
        """The client in which sessions are opened."""

    async def open(self) -> None: ...

    async def probe(self, timeout_s: float) -> DaemonReport:
        """Ask for health, pool and load. Raises FailedPreconditionError if the daemon does not serve."""

    def events(self, start_number: int, daemon_id: int) -> AsyncIterator[KVEventBatch]: ...

    def stop_events(self) -> None:
        """End the stream of events, and all later ones. Any thread may call this."""

    async def match_prefix(self, token_ids: Iterable[int], extra_keys: ExtraKeys, timeout_s: float) -> int:
        """Return how many leading tokens of the prompt are cached, in a session that belongs to the link."""

    async def close(self) -> None: ...


MakeLink = Callable[[str], DaemonLink[ClientT]]


class ClientOptions(TypedDict, total=False):
    """The options of the clients of all daemons; see KVClient."""

    tls: TLSOption
    token: str | os.PathLike[str]
    timeout_s: float | None
    reconnect_wait_s: float
    transport: str


def control_options(options: ClientOptions) -> dict[str, Any]:
    """Return the options of the client that asks a daemon. It transports no tensors and does not wait."""
    shared = {name: value for name, value in options.items() if name in ("tls", "token")}
    return shared | {"connect_timeout_s": None, "transport": "inline", "reconnect_wait_s": 0.0}


def check_serving(status: health_pb2.HealthCheckResponse, trailing: Iterable[Any] | None) -> None:
    """Raise FailedPreconditionError with the reason if the daemon says that it does not serve."""
    if status.status != health_pb2.HealthCheckResponse.SERVING:
        reason = dict(trailing or ()).get(HEALTH_REASON, "it gives no reason")
        raise FailedPreconditionError(f"the daemon does not serve: {reason}")


def to_report(info: pool_pb2.GetInfoResponse, stats: pool_pb2.GetStatsResponse) -> DaemonReport:
    used = stats.active_blocks + stats.shared_blocks + stats.pinned_blocks
    return DaemonReport(from_message(PoolInfo, info), Load(max(1, stats.num_blocks), used))
