"""The limit on file descriptors. The daemon starts only if the limit is sufficient for its configuration."""

from __future__ import annotations

import logging
import resource

from kvservice.config import ServeConfig
from kvservice.server.listening import ConfigError
from kvservice.server.memory.fd_passing import MAX_OFFERS_OF_SESSION
from kvservice.server.tiering.store import MAX_WRITERS

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
