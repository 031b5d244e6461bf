"""The daemon's side of the observer, a child process that reads the daemon's bookkeeping from shared memory.

The event loop answers only two requests of the observer: it writes the gauges of the whole daemon, and it returns the
hash of a block that a user has selected. The observer reads everything else from read-only shared memory and does the
computation in its own process; see kvservice.observer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvservice import __version__, plain_json
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.engine import CacheEngine
from kvservice.errors import ObserverUnavailableError
from kvservice.kept.report import RestartReport
from kvservice.owned import OwnedProcess
from kvservice.server.calls.events import EventStreams
from kvservice.server.rpc.callers import Audit, Credentials
from kvservice.server.rpc.peers import Peers
from kvservice.server.rpc.stream import Dispatcher
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.server.sessions.saved import SavedSessions
from kvservice.server.tenants import MAX_TENANTS
from kvservice.server.tiering.pool_tier import PoolTier
from kvservice.server.tiering.store import ServerStore
from kvservice.server.watching.housekeeping import ConnectionWatch, IntegrityWatch
from kvservice.telemetry.arrays import SharedArrays
from kvservice.telemetry.link import (
    BLOCK_HASH,
    CONFIGURE,
    WRITE_STATS,
    Asker,
    ShownPart,
    answer_all,
    open_link,
    snapshot_question,
)
from kvservice.telemetry.tables import (
    DaemonStatsTable,
    EngineTable,
    FiguresTable,
    SavedStats,
    SchedulerTable,
    ServerStats,
    StoreTable,
    TenantTable,
    TierTable,
    TransferTable,
)
from kvservice.tiers import TierChain, TierStats
from kvservice.tiers.protocol import SpillStats

logger = logging.getLogger(__name__)

RESTART_S = 1.0
# How long a client's call waits for the observer. `kvservice top` waits for longer, so that it gets the error. Until
# the first observer has started, calls wait for its start too.
ANSWER_S, FIRST_ANSWER_S = 4.0, 10.0
# The observer makes a request every second. It is replaced when it has made none for SILENT_S, or has not started
# within STARTING_S.
SILENT_S, STARTING_S = 20, 120
_REPLACED = f"if it makes no request for {SILENT_S} s, another is started"


class Observing:
    """Starts the observer on first use, exchanges requests with it, and restarts it when it exits or hangs."""

    def __init__(
        self,
        arrays: SharedArrays,
        configuration: dict[str, object],
        write_stats: Callable[[], None],
        block_hash: Callable[[int], bytes],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`configuration` is sent to the observer. `block_hash` maps a block id to the hash of the block, and must
        accept any number."""
        self._arrays = arrays
        self._configuration = configuration
        self._write_stats = write_stats
        self._block_hash = block_hash
        self._sleep = sleep
        self._answer_s = FIRST_ANSWER_S
        self._silent_s = 0
        self._hangs = False
        self._wanted = asyncio.Event()
        self._ready = asyncio.Event()
        self._asker: Asker | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._http: socket.socket | None = None

    def report_restart(self, report: RestartReport) -> None:
        """Tell the observer what the daemon took over at its start. Called before `run`."""
        self._configuration["restart"] = report.to_json()

    def serve_http(self, listening: socket.socket) -> None:
        """Let the observer serve HTTP on this socket."""
        self._http = listening
        self._wanted.set()

    async def snapshot(self, request: bytes, part: ShownPart | None = None) -> bytes:
        """Return the observer's response to a serialized GetSnapshotRequest, of a part or of everything.
        Raises ObserverUnavailableError."""
        self._wanted.set()
        try:
            async with asyncio.timeout(self._answer_s):
                await self._ready.wait()
                assert self._asker is not None, "it is ready"
                return await self._asker.ask(snapshot_question(request, part))
        except ConnectionError:
            raise ObserverUnavailableError("the observer has ended; another is started") from None
        except TimeoutError:
            raise self._no_answer() from None

    def _no_answer(self) -> ObserverUnavailableError:
        """Log that the observer hangs, once for each observer. Returns the error for the client."""
        if not self._ready.is_set():
            return ObserverUnavailableError("the observer, which computes the answer, is starting; ask again")
        if not self._hangs:
            self._hangs = True
            logger.warning("the observer does not answer for %g s; %s", self._answer_s, _REPLACED)
        return ObserverUnavailableError(f"the observer, which computes the answer, does not answer; {_REPLACED}")

    async def run(self) -> None:
        """Run the observer until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                logger.warning("the observer %s; another is started", await self._run_once())
            except OSError as error:
                logger.warning("the observer cannot be started: %s", error)
            finally:
                self._ready.clear()
                self._end()
            await self._sleep(RESTART_S)

    async def _run_once(self) -> str:
        """Run one observer. Returns why another is needed."""
        ours_asking, theirs_answering = socket.socketpair()
        ours_answering, theirs_asking = socket.socketpair()
        with theirs_asking, theirs_answering:
            self._process = self.start_process(theirs_asking, theirs_answering)
        self._asker = Asker(*await open_link(ours_asking))
        exchange = asyncio.ensure_future(self._exchange(self._asker, *await open_link(ours_answering)))
        silence = asyncio.ensure_future(self._silence())
        try:
            await asyncio.wait((exchange, silence), return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                return f"has made no request for {self._silent_s} s and is killed"
            exchange.result()
            return "has ended"
        finally:
            exchange.cancel()
            silence.cancel()
            self._asker.close()

    async def _exchange(self, asker: Asker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Configure the observer, and answer its requests until it ends."""
        answering = asyncio.ensure_future(answer_all(reader, writer, self._answer))
        try:
            await asker.ask(CONFIGURE + plain_json.dumps(self._configuration).encode())
            self._ready.set()
            self._answer_s = ANSWER_S
            await answering
        except ConnectionError:
            pass
        finally:
            answering.cancel()

    async def _silence(self) -> None:
        """Return when the observer hangs. The seconds are counted one by one, because those in which the daemon itself
        was stopped do not count."""
        self._silent_s, self._hangs = 0, False
        while self._silent_s < (SILENT_S if self._ready.is_set() else STARTING_S):
            await self._sleep(1.0)
            self._silent_s += 1

    def start_process(self, asking: socket.socket, answering: socket.socket) -> subprocess.Popen[bytes]:
        """Start the observer with its ends of the two links. Raises OSError."""
        memory = self._arrays.read_only()
        descriptors = [memory, asking.fileno(), answering.fileno()]
        if self._http is not None:
            descriptors.append(self._http.fileno())
        try:
            return OwnedProcess(
                [sys.executable, "-P", "-m", "kvservice.observer", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(memory)

    async def _answer(self, question: bytes) -> bytes:
        self._silent_s = 0
        if question[:1] == WRITE_STATS:
            self._write_stats()
            return b""
        assert question[:1] == BLOCK_HASH, "the observer asks nothing else"
        return self._block_hash(int.from_bytes(question[1:], "little"))

    def _end(self) -> None:
        """Kill the observer if it still runs. It has no state to lose."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


# ---- gauges and configuration, which the daemon reports besides its shared bookkeeping arrays


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
        peers: Peers,
        store: ServerStore | None,
        tiers: TierReports,
        config: ServeConfig,
    ) -> None:
        self._engine, self._sessions, self._dispatcher, self._events = engine, sessions, dispatcher, events
        self._credentials, self._audit, self._integrity = credentials, audit, integrity
        self._connections, self._store, self._tiers, self._peers = connections, store, tiers, peers
        num_bytes = 0 if store is None else store.blocks.config.capacity_bytes
        self._store_table = StoreTable(num_bytes, config.max_labels + 1, arrays.zeros)
        self._scheduler_table = SchedulerTable(config.max_sessions, arrays.zeros)
        self._engine_table = EngineTable(config.max_sessions, arrays.zeros)
        self._transfer_table = TransferTable(arrays.zeros)
        self._tenant_table = TenantTable(MAX_TENANTS, arrays.zeros) if config.tenants else None
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
            closed_over_limit=self._peers.num_closed["connections"],
            closed_without_call=self._peers.num_closed["no_call"],
            closed_for_bytes=self._peers.num_closed["bytes"],
        )
        if self._store is not None:
            self._store_table.write(self._store.blocks.figures(), self._store.ready_bytes)
            own = {session.row.number: session.store for session in sessions if session.store is not None}
            self._engine_table.write({row: store.engine for row, store in own.items() if store.engine is not None})
        self._tiers.write()
        if self._tenant_table is not None:
            self._tenant_table.write(sessions.tenant_uses())
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


class TierReports:
    """Writes the figures of the tiers below the pool, and of saved sessions, into shared memory."""

    def __init__(
        self, arrays: SharedArrays, chain: TierChain | None, pool_tier: PoolTier | None, saved: SavedSessions
    ) -> None:
        self._chain, self._pool_tier, self._saved = chain, pool_tier, saved
        self._tiers = TierTable(arrays.zeros)
        self._spill_table = FiguresTable("spill", SpillStats, arrays.zeros)
        self._saved_table = FiguresTable("saved", SavedStats, arrays.zeros)

    def tiers(self) -> tuple[TierStats, ...]:
        """Return the figures of the tiers below the block store."""
        return () if self._chain is None else self._chain.stats()

    def write(self) -> None:
        self._tiers.write(self.tiers())
        if self._pool_tier is not None:
            self._spill_table.write(self._pool_tier.stats())
        if self._saved.files is not None:
            self._saved_table.write(self._saved.stats())
