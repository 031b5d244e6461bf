"""gRPC keepalive options, by which each end of a connection detects that the other is frozen or its host is down."""

from __future__ import annotations

# gRPC's minimum time between pings. Lower values have no effect.
MIN_PING_INTERVAL_MS = 1_000


def keepalive_options(timeout_s: float) -> tuple[tuple[str, int], ...]:
    """Return the options that close a connection whose other end has not answered for `timeout_s` seconds.

    The connection closes between two thirds and all of that time after the last answer. A ping is sent after a third of
    the time without traffic; its answer may take the rest. gRPC's keepalive timeout is effective only if the timeout of
    all pings, one minute by default, has the same value.
    """
    interval_ms = int(timeout_s * 1000 / 3)
    answer_ms = int(timeout_s * 1000) - interval_ms
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        # No limit on pings while there is no data to send.
        ("grpc.http2.max_pings_without_data", 0),
    )
