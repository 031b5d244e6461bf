"""Metrics of connections and refused calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kvservice.metrics.families import counter, counters, gauge, gauges
from kvservice.telemetry.daemon_stats import ServerStats


def access_metrics(server: ServerStats, http_refusals: Mapping[str, int], max_connections: int) -> Iterator[Metric]:
    """`http_refusals`: HTTP requests that were refused, by what they asked for."""
    connections = {"unix": server.open_unix_connections, "tcp": server.open_tcp_connections}
    yield gauges("connections", "Open gRPC connections, counted every 10 seconds.", "address", connections.items())
    yield gauge("capacity_connections", "Most gRPC connections of an address: max_connections.", max_connections)
    yield counter("tcp_connections", "Connections over TCP that a call was accepted on.", server.tcp_connections)
    yield counter(
        "tls_handshakes", "TLS handshakes that gRPC clients began, failed ones included.", server.tls_handshakes
    )
    causes = {
        "missing_token": server.missing_tokens,
        "malformed_token": server.malformed_tokens,
        "unknown_token": server.unknown_tokens,
        "foreign_session": server.foreign_sessions,
    }
    yield counters(
        "refused_calls",
        "Calls over TCP refused for a missing or wrong token, and calls refused for naming another's session.",
        "cause",
        causes.items(),
    )
    yield counters(
        "http_refused_requests",
        "HTTP requests refused for lack of a token or because of their Host header, by what they asked for.",
        "target",
        http_refusals.items(),
    )
