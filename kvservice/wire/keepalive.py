"""How each end of a connection notices that the other is frozen, or its host gone: gRPC's arguments for it."""

from __future__ import annotations

# gRPC pings no more often, whatever its arguments say.
MIN_PING_INTERVAL_MS = 1_000


def keepalive_options(timeout_s: float) -> tuple[tuple[str, int], ...]:
    """The connection ends when the other end has not answered for `timeout_s`, and at most a third of it sooner.

    A ping is sent when nothing has come for a third of the time; its answer has the rest. What gRPC calls the
    keepalive's timeout has no effect while its timeout of every ping, a minute by default, is not the same.
    """
    interval_ms = int(timeout_s * 1000 / 3)
    answer_ms = int(timeout_s * 1000) - interval_ms
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        # As many as are needed while there is nothing else to send.
        ("grpc.http2.max_pings_without_data", 0),
    )
