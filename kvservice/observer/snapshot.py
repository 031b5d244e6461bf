"""Snapshots for `kvservice top` and the page: the state as rows and rates. Rows are dicts with the fields of the
contract."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvservice.kept.report import RestartReport
from kvservice.observer.history import History
from kvservice.store.figures import ModelFigures
from kvservice.telemetry.figures import NO_LIMIT
from kvservice.telemetry.link import ShownPart
from kvservice.telemetry.reading import Reader, Reading, SequenceRows, SessionReading
from kvservice.tiers.spill_stats import SpillStats
from kvservice.v1 import inspect_pb2

# The fields of `PoolSnapshot` have the names of `BlocksStats` and `ServerStats`.
_POOL = tuple(inspect_pb2.PoolSnapshot.DESCRIPTOR.fields_by_name)
# These fields of `SpillSnapshot` have the names of `SpillStats`.
_SPILL = tuple(name for name in inspect_pb2.SpillSnapshot.DESCRIPTOR.fields_by_name if name in SpillStats._fields)
# These fields of `StoreSnapshot` have the names of `ModelFigures`.
_STORE = tuple(name for name in inspect_pb2.StoreSnapshot.DESCRIPTOR.fields_by_name if name in ModelFigures._fields)


def take_snapshot(
    reader: Reader,
    history: History,
    latest: Reading,
    max_sessions: int,
    max_sequences: int,
    search: str,
    part: ShownPart | None = None,
) -> dict[str, Any]:
    """Return the fields of `Snapshot` for the latest reading, with rates from the history. GetSnapshotRequest describes
    `search`. With `part`, the rows are those of its tenant alone."""
    search = search.lower()
    shown = [one for one in latest.sessions if part is None or one.session_id in part.session_ids]
    sessions = [session for session in shown if _fits(session, search)]
    sessions.sort(key=lambda session: (-session.blocks, session.session_id))
    found = {session.session_id for session in sessions}
    sequences, num_sequences = _sequences(reader, found, max_sequences, search, part)
    return (
        {
            "time_s": time.time(),
            "uptime_s": latest.time_s - reader.started_s,
            "pool": _pool(latest),
            "rates": history.rates(),
            "calls": history.calls(),
            "sessions": [_session(session, latest.time_s) for session in sessions[:max_sessions]],
            "sequences": sequences,
            "num_sessions": len(sessions),
            "num_sequences": num_sequences,
            "restart": _restart(reader.restart),
            "tiers": _tiers(latest, history),
        }
        | _store(latest, history)
        | _spill(latest, history)
        | _transfers(latest, history)
        | _scheduling(latest, history)
        | {"tenants": _tenants(latest, part)}
    )


def _fits(session: SessionReading, search: str) -> bool:
    return search in session.name.lower() or search in session.tenant.lower() or search == str(session.session_id)


def _pool(latest: Reading) -> dict[str, Any]:
    figures = latest.blocks._asdict() | latest.server._asdict()
    return {name: int(figures[name]) for name in _POOL} | {"draining": bool(latest.server.draining)}


def _restart(report: RestartReport) -> dict[str, Any]:
    shown = {name: value for name, value in report.to_json().items() if name not in ("totals", "missing")}
    return shown | {"summary": report.summary}


def _store(latest: Reading, history: History) -> dict[str, Any]:
    """Return the sums over all models, or nothing if the daemon has no store."""
    if not latest.store_bytes:
        return {}
    models = latest.store_models.values()
    sums = {name: sum(getattr(model, name) for model in models) for name in _STORE}
    sizes = {"num_bytes": latest.store_bytes, "ready_bytes": latest.store_ready_bytes}
    return {"store": sizes | sums | history.store()}


def _tiers(latest: Reading, history: History) -> list[dict[str, Any]]:
    rates = history.tiers()
    return [tier._asdict() | rates.get(tier.name, {}) for tier in latest.tiers]


def _spill(latest: Reading, history: History) -> dict[str, Any]:
    """Return the figures of spilled blocks and of saved sessions, if the daemon has them."""
    found: dict[str, Any] = {}
    if latest.spill is not None:
        figures = latest.spill._asdict()
        found["spill"] = {name: figures[name] for name in _SPILL} | history.spill()
    if latest.saved is not None:
        found["saved"] = latest.saved._asdict()
    return found


def _transfers(latest: Reading, history: History) -> dict[str, Any]:
    """Return the figures of transfers between hosts, or nothing if the daemon has no transfer engines."""
    if latest.transfers is None:
        return {}
    return {"transfers": latest.transfers.stats._asdict() | history.transfers()}


def _scheduling(latest: Reading, history: History) -> dict[str, Any]:
    """Return the figures of all schedulers, or nothing before the first request."""
    totals = latest.schedulers.totals
    if not totals.added + totals.refused:
        return {}
    return {"scheduling": {"totals": totals._asdict()} | history.scheduling()}


def _tenants(latest: Reading, part: ShownPart | None) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "quotas": [
                {"limit": limit, "used": use.used, "refused": int(use.refused)}
                | ({} if use.limit == NO_LIMIT else {"value": use.limit})
                for limit, use in quotas.items()
            ],
        }
        for name, quotas in latest.tenant_quotas.items()
        if part is None or name == part.tenant
    ]


def _session(session: SessionReading, now_s: float) -> dict[str, Any]:
    scheduler = {} if session.scheduler is None else {"scheduler": session.scheduler._asdict()}
    engine = {} if session.engine is None else {"engine": session.engine._asdict()}
    return (
        scheduler
        | engine
        | {
            "session_id": session.session_id,
            "name": session.name,
            "tenant": session.tenant,
            "attached": session.attached,
            "age_s": now_s - session.opened_s,
            "sequences": session.sequences,
            "swapped_sequences": session.swapped_sequences,
            "tokens": session.tokens,
            "blocks": session.blocks,
            "regions": session.regions,
            "region_bytes": session.region_bytes,
            "lane": session.lane,
            "computed_tokens": session.computed_tokens,
            "query_tokens": session.query_tokens,
            "hit_tokens": session.hit_tokens,
        }
    )


def _sequences(
    reader: Reader, found: set[int], max_sequences: int, search: str, part: ShownPart | None
) -> tuple[list[dict[str, Any]], int]:
    """Return the largest sequences that match the search, and the number of matches. A sequence matches if its session
    is one of `found` or if its id contains the search text. With `part`, its session is one of that."""
    rows = reader.sequences()
    owners = {number: reader.session(number) for number in np.unique(rows.sessions).tolist()}
    if search or part is not None:
        chosen = []
        for i, (owner, sequence_id) in enumerate(zip(rows.sessions.tolist(), rows.ids.tolist(), strict=True)):
            session_id = owners[owner][0]
            if session_id in found or (search in str(sequence_id) and (part is None or session_id in part.session_ids)):
                chosen.append(i)
        fitting = np.array(chosen, np.int64)
    else:
        fitting = np.arange(len(rows.ids))
    order = fitting[np.argsort(-rows.blocks[fitting], kind="stable")][:max_sequences]
    return [_sequence(rows, i, *owners[int(rows.sessions[i])]) for i in order.tolist()], len(fitting)


def _sequence(rows: SequenceRows, i: int, session_id: int, session_name: str) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "session_name": session_name,
        "sequence_id": int(rows.ids[i]),
        "length": int(rows.lengths[i]),
        "computed": int(rows.computed[i]),
        "blocks": int(rows.blocks[i]),
        "swapped": bool(rows.swapped[i]),
    }
