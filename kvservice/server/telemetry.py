"""The gauges and the configuration that the daemon reports to its observer, besides its shared bookkeeping arrays."""

from __future__ import annotations

import time
from typing import Any

from kvservice import __version__
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.engine import CacheEngine
from kvservice.kept.report import RestartReport
from kvservice.server.audit import Audit
from kvservice.server.credentials import Credentials
from kvservice.server.dispatch import Dispatcher
from kvservice.server.events import EventStreams
from kvservice.server.integrity import IntegrityWatch
from kvservice.server.open_connections import ConnectionWatch
from kvservice.server.sessions import SessionRegistry
from kvservice.server.tier_reports import TierReports
from kvservice.store import BlockStore
from kvservice.telemetry.arrays import SharedArrays
from kvservice.telemetry.daemon_stats import DaemonStatsTable, ServerStats
from kvservice.telemetry.scheduling import SchedulerTable
from kvservice.telemetry.store import StoreTable
from kvservice.telemetry.transfers import TransferTable


class StatsWriter:
    """Writes the gauges and counters of the whole daemon into shared memory, on request."""

    def __init__(
        self,
        arrays: SharedArrays,
        engine: CacheEngine,
        sessions: SessionRegistry,
        dispatcher: Dispatcher,
        events: EventStreams,
        credentials: Credentials,
        audit: Audit,
        integrity: IntegrityWatch,
        connections: ConnectionWatch,
        store: BlockStore | None,
        tiers: TierReports,
        config: ServeConfig,
    ) -> None:
        self._engine, self._sessions, self._dispatcher, self._events = engine, sessions, dispatcher, events
        self._credentials, self._audit, self._integrity = credentials, audit, integrity
        self._connections, self._store, self._tiers = connections, store, tiers
        num_bytes = 0 if store is None else store.config.capacity_bytes
        self._store_table = StoreTable(num_bytes, config.max_labels + 1, arrays.zeros)
        self._scheduler_table = SchedulerTable(config.max_sessions, arrays.zeros)
        self._transfer_table = TransferTable(arrays.zeros)
        self._table = DaemonStatsTable(len(engine.device.lane_buckets_s) + 1, arrays.zeros)

    def write(self) -> None:
        engine, sessions, dispatcher = self._engine, self._sessions, self._dispatcher
        manager, journal, busy_s = engine.manager, engine.journal, engine.device.swap_busy_s
        manager.device.ages.fold()
        lane_calls, lane_errors, lane_counts, lane_busy_s = sessions.lanes.stats()
        server = ServerStats(
            sessions=len(sessions),
            regions=sessions.region_totals.count,
            region_bytes=sessions.region_totals.num_bytes,
            lanes=len(sessions.lanes),
            event_streams=self._events.count,
            calls_in_flight=dispatcher.in_flight,
            draining=dispatcher.draining,
            open_unix_connections=self._connections.num_unix,
            open_tcp_connections=self._connections.num_tcp,
            swap_out_busy_s=busy_s["out"],
            swap_in_busy_s=busy_s["in"],
            out_of_blocks=dispatcher.out_of_blocks,
            sessions_opened=sessions.num_opened,
            sessions_closed=sessions.num_closed,
            sessions_lost=sessions.num_lost,
            stored_events=journal.num_stored if journal else 0,
            removed_events=journal.num_removed if journal else 0,
            cleared_events=journal.num_cleared if journal else 0,
            lane_calls=lane_calls,
            lane_errors=lane_errors,
            lane_busy_s=lane_busy_s,
            tcp_connections=self._audit.num_connections,
            tls_handshakes=self._credentials.num_handshakes,
            missing_tokens=self._audit.refusals["missing"],
            malformed_tokens=self._audit.refusals["malformed"],
            unknown_tokens=self._audit.refusals["unknown"],
            foreign_sessions=sessions.num_foreign,
            integrity_checks=self._integrity.num_checks,
            integrity_failures=self._integrity.num_failures,
        )
        if self._store is not None:
            self._store_table.write(self._store.figures())
        self._tiers.write()
        sessions.transfers.write(self._transfer_table)
        schedulers = engine.schedulers
        by_row = {namespace - 1: figures for namespace, figures in schedulers.figures().items()}
        self._scheduler_table.write(by_row, schedulers.totals(), schedulers.latencies)
        self._table.write(manager.stats(), server, lane_counts)


def configuration(
    config: ServeConfig, device: Device, store_bytes: int, arrays: SharedArrays, methods: list[str]
) -> dict[str, Any]:
    """Return the configuration that the observer needs to read the arrays and to serve HTTP for the daemon.
    `store_bytes` is the memory of the block store, 0 if there is none. `Observing.report_restart` puts in
    what the daemon took over at its start."""
    layout = config.layout
    host = config.http_address.rpartition(":")[0]
    return {
        "manifest": arrays.manifest,
        "methods": methods,
        "started_s": time.monotonic(),
        "restart": RestartReport().to_json(),
        "lane_buckets_s": device.lane_buckets_s,
        "memory_bytes": device.memory_bytes | ({"store": store_bytes} if store_bytes else {}),
        "max_labels": config.max_labels,
        "max_connections": config.connection_limit,
        "http_host": host,
        "http_token": config.http_token,
        "metrics_token": config.metrics_token,
        "tls_cert": config.tls_cert,
        "tls_key": config.tls_key,
        "log_level": config.log_level,
        "log_format": config.log_format,
        "info": {
            "version": __version__,
            "device": config.device,
            "dtype": config.dtype,
            "kv_cache_dtype": layout.dtype,
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "block_size": config.block_size,
            "block_bytes": layout.block_bytes,
            "num_blocks": device.num_blocks,
            "num_swap_blocks": device.num_swap_blocks,
            "max_sequences": config.max_sequences,
            "max_sessions": config.max_sessions,
            "prefix_caching": config.enable_prefix_caching,
        },
    }
