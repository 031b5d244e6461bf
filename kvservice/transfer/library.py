"""The library of the engine: whether it is installed, and the environment of its process.

Mooncake's TCP transport advertises the address that it is given, and listens on all addresses nevertheless. A small
library of ours, which is preloaded, decides where it listens and for whom (csrc/listen).
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from dataclasses import dataclass, field
from typing import Final

from kvservice.mooncake.listening import NOWHERE, PRELOADED, listening_environment

MODULE: Final = "mooncake"
# The bytes that the engine hands to the kernel at once. They stay in a core's cache.
_CHUNK_BYTES: Final = 32 << 10
# The engines of a memory, on a host with enough cores for them and for those who copy beside them.
_NUM_ENGINES: Final = 2
_CORES_FOR_THEM: Final = 4
# The connections between two engines. One thread of the engine serves all of them.
_NUM_CONNECTIONS: Final = 2
# The engine drops a connection that makes no progress for so long, in seconds.
_PROGRESS_S: Final = 10


def is_installed() -> bool:
    """Return whether the engine can be started here."""
    return importlib.util.find_spec(MODULE) is not None and PRELOADED.exists()


def num_engines() -> int:
    """Return how many engines a memory has on this host."""
    return _NUM_ENGINES if (os.cpu_count() or 1) >= _CORES_FOR_THEM else 1


@dataclass(frozen=True)
class Endpoint:
    """The place where engines of a memory listen: `host`, a numeric address, each at two ports from `first_port` to
    `last_port`; 0 and 0: at any. They have connections with the address `peer` only; empty: with everybody. Engines
    that only `calls` do not listen. `protocol` is "tcp" or "rdma". `num_engines` share the work."""

    host: str
    protocol: str = "tcp"
    first_port: int = 0
    last_port: int = 0
    peer: str = ""
    calls: bool = False
    num_engines: int = field(default_factory=num_engines)

    def __post_init__(self) -> None:
        """Raises ValueError for an address that is not numeric."""
        for address in filter(None, (self.host, self.peer)):
            ipaddress.ip_address(address)

    @property
    def name(self) -> str:
        """The host as part of host:port."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def listens_at(self) -> str:
        return NOWHERE if self.calls else self.host

    def environment(self) -> dict[str, str]:
        """Return the environment of the engine's process."""
        variables = {
            "MC_TCP_BIND_ADDRESS": self.host,
            "MC_TCP_SLICE_SIZE": str(_CHUNK_BYTES),
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "MC_TCP_LANES_PER_PEER": str(_NUM_CONNECTIONS),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_PROGRESS_S),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(_PROGRESS_S),
            "MC_LOG_LEVEL": "ERROR",
        }
        if self.protocol == "tcp":
            variables["MC_FORCE_TCP"] = "1"
        if self.peer:
            variables["KVSERVICE_PEER_ADDRESS"] = self.peer
        if self.first_port:
            for first, last in (("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"), ("MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT")):
                variables[first], variables[last] = str(self.first_port), str(self.last_port)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        return inherited | listening_environment(self.listens_at) | variables
