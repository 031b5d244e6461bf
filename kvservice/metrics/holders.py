"""Metrics of sessions, tenants, regions and lanes. The number of label values is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kvservice.metrics.families import counter, counters, gauge, gauges
from kvservice.telemetry.reading import Reading, SessionReading

OTHER = "other"
_HELD = {
    "sequences": "Sequences held by {}.",
    "tokens": "Tokens of the sequences held by {}.",
    "blocks": "Block-table entries held by {}; a block in two tables counts twice.",
}


def holder_metrics(reading: Reading, max_labels: int, max_sessions: int, max_sequences: int) -> Iterator[Metric]:
    server = reading.server
    yield gauge("sessions", "Open sessions.", server.sessions)
    yield gauge("capacity_sessions", "Most sessions that may be open: max_sessions.", max_sessions)
    yield gauge(
        "capacity_sequences", "Most sequences that may exist, swapped ones included: max_sequences.", max_sequences
    )
    yield counter("sessions_opened", "Sessions opened.", server.sessions_opened)
    closed = {"closed": server.sessions_closed - server.sessions_lost, "lost": server.sessions_lost}
    yield counters(
        "sessions_closed",
        "Sessions that ended: closed by request, or lost because no client came back in time.",
        "reason",
        closed.items(),
    )
    yield gauge("draining", "1 while the daemon is shutting down.", server.draining)
    yield gauge("regions", "Shared-memory regions of all sessions.", server.regions)
    yield gauge("region_bytes", "Bytes of shared-memory regions.", server.region_bytes)
    yield gauge("lanes", "Open lanes of all sessions.", server.lanes)
    names = _labels(reading.sessions, max_labels)
    yield from _held(
        "session", "all sessions of a name (names beyond the first max_labels: other)", reading.sessions, names
    )
    yield from _queues(reading.sessions, names)
    tenants = {each.session_id: each.tenant for each in reading.sessions}
    yield from _held("tenant", "a tenant (beyond the first max_labels: other)", reading.sessions, tenants)
    yield from _tenant_tokens(reading)


def _labels(sessions: list[SessionReading], limit: int) -> dict[int, str]:
    """Return the label of each session: its name if it is among the first `limit` names of open sessions, else
    OTHER."""
    known: set[str] = set()
    labels = {}
    for session in sorted(sessions, key=lambda each: each.session_id):
        if len(known) < limit:
            known.add(session.name)
        labels[session.session_id] = session.name if session.name in known else OTHER
    return labels


def _held(label: str, whose: str, sessions: list[SessionReading], labels: Mapping[int, str]) -> Iterator[Metric]:
    for held, text in _HELD.items():
        sums: Counter[str] = Counter()
        for session in sessions:
            sums[labels[session.session_id]] += getattr(session, held)
        yield gauges(f"{label}_{held}", text.format(whose), label, sums.items())


def _queues(sessions: list[SessionReading], labels: Mapping[int, str]) -> Iterator[Metric]:
    """Yield the queues of the sessions that have a scheduler."""
    for state in ("waiting", "running"):
        sums: Counter[str] = Counter()
        for session in sessions:
            if session.scheduler is not None:
                sums[labels[session.session_id]] += getattr(session.scheduler, state)
        text = f"Requests that are {state}, by the name of their session (names beyond the first max_labels: other)."
        yield gauges(f"session_{state}_requests", text, "session", sums.items())


def _tenant_tokens(reading: Reading) -> Iterator[Metric]:
    for column, name, text in (
        (0, "computed_tokens", "Tokens whose K/V the sessions of a tenant have written in all layers."),
        (1, "prefix_cache_query_tokens", "Prompt tokens of a tenant looked up in the prefix cache."),
        (2, "prefix_cache_hit_tokens", "Prompt tokens of a tenant found in the prefix cache."),
    ):
        values = ((tenant, tokens[column]) for tenant, tokens in reading.tenants.items())
        yield counters(f"tenant_{name}", text, "tenant", values)
