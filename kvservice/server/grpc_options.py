"""gRPC channel arguments for the daemon's servers. gRPC ignores unknown names."""

from __future__ import annotations

from kvservice.config import ServeConfig
from kvservice.server.slots import max_rpcs, max_rpcs_of_connection
from kvservice.wire.keepalive import MIN_PING_INTERVAL_MS, keepalive_options

CONNECTION_OPTIONS: tuple[tuple[str, int], ...] = (
    # A connection is closed after this time if its client sends nothing or does not complete the TLS handshake.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Bytes of a stream that gRPC buffers before the daemon reads them. By default gRPC buffers up to 16 MiB per stream
    # for a fast client.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 512 << 10),
    # A client that pings more often than the daemon permits loses its connection.
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
)


def server_options(config: ServeConfig, *, is_reserved: bool = False) -> list[tuple[str, int]]:
    """Return all channel arguments of a server of the daemon. `is_reserved`: the daemon holds another socket that is
    bound to the server's port (kvservice.server.listening)."""
    # The limit on RPCs that have arrived but that the event loop has not accepted yet; further RPCs are cancelled. Each
    # can hold 600 KB of metadata, and by default gRPC lets 3000 wait.
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
        # A second daemon on the same port must fail, not share it. The reservation sees to that, too.
        ("grpc.so_reuseport", int(is_reserved)),
    ]
