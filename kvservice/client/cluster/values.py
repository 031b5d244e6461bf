"""The values that a cluster returns, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvservice.client.cluster.placement import PlacementSettings
from kvservice.client.requests import wait_time
from kvservice.errors import InvalidArgumentError

# Most daemons of a cluster: each has two threads of the sync API.
MAX_DAEMONS = 256


@dataclass(frozen=True)
class ClusterDaemon:
    """The state of a daemon. `reason` says why it is not used; empty: it is. `sessions` are those that this cluster has
    placed there and that are open; `known_blocks` are the cached blocks of its prefix cache that the cluster knows."""

    address: str
    is_up: bool
    reason: str
    num_blocks: int
    used_blocks: int
    sessions: int
    known_blocks: int
    events: str
    """"following", or why the cluster does not receive the daemon's block events."""


@dataclass(frozen=True)
class ClusterOptions:
    """Time limits in seconds, see Cluster."""

    connect_timeout_s: float | None
    wait_s: float
    probe_interval_s: float
    probe_timeout_s: float
    open_timeout_s: float
    placement: PlacementSettings

    @classmethod
    def of(cls, placement: PlacementSettings | None, connect_timeout_s: float | None, **waits: Any) -> ClusterOptions:
        """Raises InvalidArgumentError naming the option."""
        for name, value in waits.items():
            if wait_time(value, name) == 0 and name != "wait_s":
                raise InvalidArgumentError("must be above 0", field=name)
        if connect_timeout_s is not None:
            connect_timeout_s = wait_time(connect_timeout_s, "connect_timeout_s")
        return cls(connect_timeout_s=connect_timeout_s, placement=placement or PlacementSettings(), **waits)


def check_addresses(addresses: Any) -> tuple[str, ...]:
    """Return the addresses. Raises InvalidArgumentError."""
    if isinstance(addresses, str):
        raise InvalidArgumentError("must be a list of addresses", field="addresses")
    listed = tuple(addresses)
    if not 1 <= len(listed) <= MAX_DAEMONS or len(set(listed)) < len(listed):
        raise InvalidArgumentError(f"must be 1 to {MAX_DAEMONS} different addresses", field="addresses")
    if not all(isinstance(address, str) and address for address in listed):
        raise InvalidArgumentError("must be addresses such as unix:///path/of.sock or host:port", field="addresses")
    return listed
