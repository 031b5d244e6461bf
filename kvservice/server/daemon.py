"""The daemon: opens the pool, listens, serves, drains and exits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from typing import TYPE_CHECKING

import grpc
import uvloop

from kvservice import logs
from kvservice.blocks import KeptMaps, Slices
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.kept import KeptState, Section
from kvservice.kept.report import RestartReport
from kvservice.server import unmapping
from kvservice.server.audit import Audit
from kvservice.server.callers import Callers, LocalCallers, RemoteCallers
from kvservice.server.calls import session_handlers
from kvservice.server.contract import METHODS, SERVICES
from kvservice.server.credentials import Credentials
from kvservice.server.dispatch import Dispatcher
from kvservice.server.draining import Drain
from kvservice.server.events import EventStreams
from kvservice.server.grpc_options import server_options
from kvservice.server.health import Health
from kvservice.server.heap import freeze_heap, trim_heap
from kvservice.server.integrity import IntegrityWatch
from kvservice.server.listening import (
    ConfigError,
    check_addresses,
    listen_http,
    listen_tcp,
    listen_unix,
    open_unix_socket,
    with_port,
)
from kvservice.server.observing import Observing
from kvservice.server.open_calls import OpenCalls
from kvservice.server.open_connections import ConnectionWatch
from kvservice.server.open_files import raise_file_limit
from kvservice.server.rpc_tasks import task_factory
from kvservice.server.server_session import SessionMemory
from kvservice.server.server_store import open_store
from kvservice.server.services import Services
from kvservice.server.sessions import SessionRegistry
from kvservice.server.slots import Slots, max_rpcs
from kvservice.server.standard import health_handlers, reflection_handlers
from kvservice.server.telemetry import StatsWriter, configuration
from kvservice.telemetry.calls import CallTable

if TYPE_CHECKING:
    from kvservice.server.tracing import Tracer

logger = logging.getLogger(__name__)

EXIT_FAULT = 70


class KVServer:
    def __init__(self, config: ServeConfig) -> None:
        check_addresses(config)
        self._config = config
        self.credentials = Credentials(config)
        self.audit = Audit()
        self._remote_callers = RemoteCallers(self.credentials.tokens, bool(config.tls_client_ca), self.audit)
        self.device = open_device(config)
        self.kept = KeptState.fresh()
        arrays = self.kept.arrays
        section = self.kept.table.section
        maps = KeptMaps(
            extra_keys=section(Section.EXTRA_KEYS),
            pins=section(Section.PINS),
            lost=section(Section.LOST_SEQUENCES),
            steps=section(Section.STEPS),
        )
        self.engine = CacheEngine(config, self.device, arrays, maps)
        memory = SessionMemory.of(config, arrays, section(Section.SESSIONS))
        self.store = open_store(config, self.engine.journal)
        blocks = None if self.store is None else self.store.blocks
        self.sessions = SessionRegistry(config, self.engine.manager, self.device, memory, store=blocks)
        self._tracer = _open_tracer(config)
        self.events = EventStreams(config, self.engine.journal)
        capacity_bytes = 0 if self.store is None else self.store.blocks.config.capacity_bytes
        open_calls = OpenCalls(
            config, self.engine, self.sessions, capacity_bytes, lambda request: self.observing.snapshot(request)
        )
        handlers = (*session_handlers(config, self.engine, self.store), *open_calls.handlers())
        calls = CallTable(METHODS, arrays.zeros)
        self.dispatcher = Dispatcher(handlers, self.sessions, calls, self._tracer, lambda: None)
        self._health = Health()
        self.integrity = IntegrityWatch(self._check_in_slices, self.dispatcher, self._set_health)
        self._connections = ConnectionWatch(config.connection_limit)
        stats = StatsWriter(
            arrays.shared,
            self.engine,
            self.sessions,
            self.dispatcher,
            self.events,
            self.credentials,
            self.audit,
            self.integrity,
            self._connections,
            blocks,
            config,
        )
        store_bytes = 0 if self.store is None else self.store.memory.num_bytes
        reported = configuration(config, self.device, store_bytes, arrays.shared, METHODS)
        self.observing = Observing(arrays.shared, reported, stats.write, self.engine.manager.block_hash)
        self.restart = RestartReport()
        self._slots: list[Slots] = []
        self._stop = asyncio.Event()

    async def serve(self) -> int:
        """Serve until SIGTERM, SIGINT or a device fault. Returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(task_factory)
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._stop.set)
        self.device.on_fault = functools.partial(loop.call_soon_threadsafe, self._stop.set)
        with contextlib.ExitStack() as cleanup:
            servers = self._listen(cleanup)
            if self._config.http_address:
                self._serve_http(listen_http(self._config.http_address, cleanup))
            for server in servers:
                await server.start()
            open_unix_socket(self._config)
            loop.add_reader(self.sessions.lanes.descriptor, self.sessions.lanes.commit_finished)
            tasks = (
                self.sessions.fd_server.serve(),
                self.observing.run(),
                self.credentials.keep_current(self._end_revoked),
                *(slots.end_stalled() for slots in self._slots),
                trim_heap(),
                self._connections.run(),
                self.integrity.run(self._config.integrity_interval_s),
            )
            self.observing.report_restart(self.restart)
            unmapping.start()
            freeze_heap()
            beside = [asyncio.create_task(task) for task in tasks]
            self._set_health()
            logger.info(
                "serving %d blocks of %d bytes on %s",
                self.device.num_blocks,
                self._config.layout.block_bytes,
                ", ".join(self._connections.addresses),
            )
            memory = ", ".join(f"{use} {num_bytes}" for use, num_bytes in self.device.memory_bytes.items())
            logger.info("bytes taken on %s: %s", self._config.device, memory)
            if self.store is not None:
                num_bytes = self.store.memory.num_bytes
                logger.info("the block store takes %d bytes, share_store is %s", num_bytes, self.store.shared)
            await self._stop.wait()
            if self.device.fault is None:
                await self._drain()
            await asyncio.gather(*(server.stop(grace=0.5) for server in servers))
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            loop.remove_reader(self.sessions.lanes.descriptor)
            self.sessions.lanes.close()
            self.device.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        logger.info("stopped")
        return EXIT_FAULT if self.device.fault is not None else 0

    def _listen(self, cleanup: contextlib.ExitStack) -> list[grpc.aio.Server]:
        """Return one gRPC server per address, not yet started. Raises ConfigError."""
        config = self._config
        servers = []
        if config.unix_socket:
            servers.append(self._server(LocalCallers()))
            listen_unix(servers[-1], config, self.sessions.fd_server, cleanup)
            self._connections.add_unix(config.unix_socket)
        if config.tcp_address:
            servers.append(self._server(self._remote_callers))
            self._connections.add_tcp(listen_tcp(servers[-1], config.tcp_address, self.credentials.for_server()))
        return servers

    def _serve_http(self, listening: socket.socket) -> None:
        self.observing.serve_http(listening)
        address = with_port(self._config.http_address, listening.getsockname()[1])
        logger.info("the page and /metrics are at %s://%s/", "https" if self._config.tls_cert else "http", address)

    def _server(self, callers: Callers) -> grpc.aio.Server:
        config = self._config
        slots = Slots(config)
        self._slots.append(slots)
        server = grpc.aio.server(
            interceptors=callers.interceptors,
            options=server_options(config),
            maximum_concurrent_rpcs=max_rpcs(config),
        )
        limits = config.request_limits
        services = Services(self.dispatcher, self.sessions, self.events, limits, callers, slots)
        slots.add(services.handlers())
        slots.add(health_handlers(self._health, limits, slots, callers))
        slots.add(reflection_handlers(limits, slots, callers))
        server.add_generic_rpc_handlers((slots,))
        return server

    def _end_revoked(self) -> None:
        """End the streams of callers whose tokens were removed from the token file."""
        self.sessions.end_streams_of(self._remote_callers.check)
        for slots in self._slots:
            slots.end_revoked(self._remote_callers.check)

    def _check_in_slices(self) -> Slices[bool]:
        """Check all bookkeeping. Returns whether the pass was complete."""
        complete = yield from self.engine.manager.check_integrity_in_slices()
        yield from self.engine.schedulers.check_in_slices()
        if self.store is not None:
            yield from self.store.blocks.check_in_slices()
        return complete

    def _set_health(self, reason: str = "") -> None:
        """Set the health of all services: serving without a `reason`, else not serving.

        Corrupt bookkeeping is such a reason, because one sequence could read the K/V of another, and a wrong answer
        is worse than none.
        """
        for name in ("", *(service.full_name for service in SERVICES)):
            self._health.set(name, reason=reason)

    async def _drain(self) -> None:
        """Refuse new work, and wait for calls in flight and for started steps that make progress."""
        self.dispatcher.draining = True
        self.sessions.lanes.drain()
        self._set_health(self.integrity.failure or "the daemon is shutting down")
        logger.info("draining")
        loop = asyncio.get_running_loop()
        drain = Drain(self._config.drain_timeout_s, self._config.drain_stall_s, loop.time())
        while drain.goes_on(loop.time(), self.dispatcher.in_flight, self.sessions.layers_in_progress()):
            await asyncio.sleep(0.02)


def _open_tracer(config: ServeConfig) -> Tracer | None:
    """Open the tracer, if one is configured. Raises ConfigError if OpenTelemetry is not installed, and
    InvalidArgumentError for an invalid endpoint."""
    if not config.otel_endpoint:
        return None
    try:
        from kvservice.server.tracing import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: traces need kvservice[otel]", field="otel_endpoint") from None
    return Tracer(config.otel_endpoint, config.otel_sample_ratio)


async def _main(config: ServeConfig) -> int:
    return await KVServer(config).serve()


def run(config: ServeConfig) -> int:
    """Run a daemon in this process until a signal or a fault ends it. Returns the exit status."""
    logs.configure(config.log_level, config.log_format)
    raise_file_limit(config)
    return uvloop.run(_main(config))
