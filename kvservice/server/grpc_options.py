"""gRPC's arguments for the daemon's side of its connections. gRPC ignores a name that it does not know."""

from __future__ import annotations

from kvservice.config import ServeConfig
from kvservice.server.slots import max_rpcs, max_rpcs_of_connection
from kvservice.wire.keepalive import MIN_PING_INTERVAL_MS, keepalive_options

CONNECTION_OPTIONS: tuple[tuple[str, int], ...] = (
    # A second daemon on the same port must fail, not share it.
    ("grpc.so_reuseport", 0),
    # A connection whose client says nothing, or does not get on with TLS, ends after this time.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # What is taken in of a stream before it is wanted. Left to itself, gRPC takes up to 16 MiB of a fast client's.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 512 << 10),
    # A client that pings more often than the daemon permits loses its connection.
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
)


def server_options(config: ServeConfig) -> list[tuple[str, int]]:
    """All options of the daemon's server."""
    # RPCs that have come and that the event loop has not looked at yet; more are cancelled. Each may hold 600 KB of
    # metadata, whatever its frames are: left to itself, gRPC lets 3000 wait.
    waiting = max_rpcs(config)
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_allowed_incoming_connections", config.connection_limit),
        ("grpc.max_concurrent_streams", max_rpcs_of_connection(config)),
        ("grpc.server.max_pending_requests", waiting),
        ("grpc.server.max_pending_requests_hard_limit", waiting),
        *keepalive_options(config.client_timeout_s),
        *CONNECTION_OPTIONS,
    ]
