"""The daemon: opens the pool, listens, serves, drains and exits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import uvloop

from kvservice import logs
from kvservice.config import ServeConfig
from kvservice.devices import prepare_device
from kvservice.errors import KVServiceError, RestartingError
from kvservice.keeper.notify import HANDOVER, READY, Notifier, Standby, taken_descriptors
from kvservice.keeper.private_paths import MAX_SOCKET_PATH_BYTES, door_path, remove_own
from kvservice.kept import KeptFiles, KeptState, Section
from kvservice.kept.report import FIRST_START, REFUSED, RestartReport, count_restart
from kvservice.server.calls.admin import AdminCalls
from kvservice.server.calls.attention import AttentionCalls
from kvservice.server.calls.blocks import BlockCalls
from kvservice.server.calls.events import EventStreams
from kvservice.server.calls.memory import HostCalls, RegionCalls, TransferCalls
from kvservice.server.calls.scheduler import SchedulerCalls
from kvservice.server.calls.store import StoreCalls, StoreCopyCalls
from kvservice.server.core import ENDED_EARLY, Core, open_core, state_identity
from kvservice.server.loop import Clock, SystemClock
from kvservice.server.memory.budget import start_unmapping
from kvservice.server.rpc.callers import Audit, Callers, Credentials, LocalCallers, RemoteCallers
from kvservice.server.rpc.contract import METHODS, SERVICES
from kvservice.server.rpc.listening import (
    ConfigError,
    KeptSockets,
    check_addresses,
    check_free,
    listen_door,
    listen_http,
    listen_tcp,
    listen_unix,
    raise_file_limit,
    with_port,
)
from kvservice.server.rpc.peers import Peers
from kvservice.server.rpc.slots import (
    DOOR_CONNECTIONS,
    Slots,
    accept_any_path,
    max_rpcs,
    server_options,
    task_factory,
)
from kvservice.server.rpc.standard import Health, health_handlers, note_of, reflection_handlers
from kvservice.server.rpc.stream import Dispatcher, Services
from kvservice.server.tenants import Door
from kvservice.server.tiering.pool_tier import open_pool_tier
from kvservice.server.tiering.store import check_mooncake
from kvservice.server.watching.housekeeping import ConnectionWatch, IntegrityWatch, freeze_heap, trim_heap
from kvservice.server.watching.observing import Observing, StatsWriter, TierReports, configuration
from kvservice.telemetry.tables import CallTable

if TYPE_CHECKING:
    from kvservice.server.rpc.tracing import Tracer

logger = logging.getLogger(__name__)

EXIT_FAULT = 70
EXIT_REFUSED = 1
# The key of the operator's door among the addresses.
DOOR: Final = "door"
# The time between attempts to listen on an address that this process could not have.
LISTEN_AGAIN_S: Final = 1.0
# The time that a daemon which hands over waits for the next layer of a step.
HAND_OVER_STALL_S: Final = 0.25
# Variables in which the keeper says how often it has restarted the daemon, and when the process before ended, in
# seconds of the monotonic clock.
RESTARTS: Final = "KVSERVICE_RESTARTS"
ENDED_AT: Final = "KVSERVICE_ENDED_AT"
# The field of /proc/PID/stat with the start of the process, counted after the name of its program.
_START_FIELD: Final = 19


class KVServer:
    def __init__(
        self,
        config: ServeConfig,
        files: KeptFiles,
        manager: Notifier | None = None,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`files` has the state of the process before, if it is kept. `manager` is the process that keeps it. `wall`
        returns seconds since 1970. Raises ConfigError and KVServiceError if the daemon cannot start with its
        configuration."""
        started_s = time.monotonic()
        check_addresses(config)
        check_mooncake(config)
        self._config = config
        self.credentials = Credentials(config)
        self.audit = Audit()
        self._tenants = tenants = self.credentials.tenants
        self.peers = Peers(config)
        self._remote_callers = RemoteCallers(
            self.credentials.tokens, bool(config.tls_client_ca), self.audit, self.peers, tenants
        )
        self._manager = manager
        self._kept_sockets = KeptSockets(files)
        self._tracer = _open_tracer(config)
        self.core = open_core(config, files, clock=clock, wall=wall, tenants=tenants)
        with self.core.starting():
            self._assemble(self.core, clock)
        self._started_s = started_s
        self._servers: list[grpc.aio.Server] = []
        self._slots: list[Slots] = []
        # The paths of the unix sockets.
        self._paths: dict[str, os.stat_result] = {}
        # The operator's door is no option: its path follows from the unix socket's.
        self._addresses = {
            "unix_socket": config.unix_socket,
            DOOR: door_path(config.unix_socket),
            "tcp_address": config.tcp_address,
            "http_address": config.http_address,
        }
        # Why an address is not open, by its key in `_addresses`.
        self._not_open: dict[str, ConfigError] = {}
        self._stop = asyncio.Event()
        self._server_ended = False

    def _assemble(self, core: Core, clock: Clock | None) -> None:
        """Make the parts that work on the state, and tell of it."""
        config = self._config
        self.device, self.engine, self.sessions, self.store = core.device, core.engine, core.sessions, core.store
        # The tiers below the block store, or None.
        self.chain = None if self.store is None else self.store.chain
        arrays = core.kept.arrays
        self.events = EventStreams(config, self.engine.journal)
        capacity_bytes = 0 if self.store is None else self.store.blocks.config.capacity_bytes
        self.pool_tier = tier = open_pool_tier(config, self.engine, self.store, clock)
        policy_time = (clock or SystemClock()).time
        handlers = (
            *BlockCalls(config, self.engine, core.saved.swaps, tier).handlers(),
            *AttentionCalls(config, self.engine).handlers(),
            *RegionCalls().handlers(),
            *TransferCalls().handlers(),
            *HostCalls(self.engine.manager).handlers(),
            *SchedulerCalls(config, self.engine, tier, policy_time).handlers(),
            *StoreCalls(self.store).handlers(),
            *StoreCopyCalls(config, self.store).handlers(),
            *AdminCalls(
                config,
                self.engine,
                self.sessions,
                core.saved,
                capacity_bytes,
                lambda request, part: self.observing.snapshot(request, part),
            ).handlers(),
        )
        calls = CallTable(METHODS, arrays.zeros)
        end_operation = self.engine.manager.end_operation
        self.dispatcher = Dispatcher(handlers, self.sessions, calls, self._tracer, end_operation, self._tenants)
        tiers = TierReports(arrays.shared, self.chain, tier, core.saved)
        self._health = Health(
            lambda: note_of(
                tiers.tiers(),
                "" if self.store is None else self.store.growth.note,
                core.saved.note,
                self.sessions.transfers.note,
                self.credentials.note,
                *map(str, self._not_open.values()),
                disk=config.disk,
                faults=None if self.chain is None else self.chain.faults(),
            )
        )
        self.integrity = IntegrityWatch(core.check_in_slices, self.dispatcher, self._set_health)
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
            self.peers,
            self.store,
            tiers,
            config,
        )
        store_bytes = 0 if self.store is None else self.store.memory.num_bytes
        reported = configuration(config, self.device, store_bytes, arrays.shared, METHODS)
        self.observing = Observing(arrays.shared, reported, stats.write, self.engine.manager.block_hash)

    async def serve(self) -> int:
        """Serve until SIGTERM, SIGINT, SIGUSR1 or a device fault. Returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(task_factory)
        accept_any_path()
        self._handle_signals(loop)
        self.device.on_fault = functools.partial(loop.call_soon_threadsafe, self._stop.set)
        with contextlib.ExitStack() as cleanup:
            with self.core.starting():
                self._listen(cleanup)
            self._kept_sockets.drop_unused()
            self.core.kept.ready()
            for server in self._servers:
                await server.start()
            loop.add_reader(self.sessions.lanes.descriptor, self.sessions.lanes.commit_finished)
            tasks = (
                self._listen_again(cleanup),
                *(self._outlast(server) for server in self._servers),
                self.observing.run(),
                self.credentials.keep_current(self._end_revoked, self.sessions.apply_tenants),
                *(slots.end_stalled() for slots in self._slots),
                trim_heap(),
                self._connections.run(),
                self.peers.run(lambda: self.dispatcher.num_begun),
                self.integrity.run(self._config.integrity_interval_s),
                self.core.saved.run(),
                *(() if self.pool_tier is None else (self.pool_tier.run(),)),
                *(() if self.store is None else (self.store.growth.run(self.sessions.budget),)),
            )
            if self.chain is not None:
                self.chain.start()
            self.observing.report_restart(self._report_restart())
            start_unmapping()
            freeze_heap()
            beside = [asyncio.create_task(task) for task in tasks]
            for task in beside:
                task.add_done_callback(_tell_failure)
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
            if self._manager is not None:
                self._manager.send(READY)
            await self._stop.wait()
            if self.device.fault is None:
                await self._drain()
            grace_s = 0.1 if self.dispatcher.restarting else 0.5
            await asyncio.gather(*(server.stop(grace=grace_s) for server in self._servers))
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            if self.pool_tier is not None:
                await self.pool_tier.close()
            if self.chain is not None:
                await self.chain.close()
            loop.remove_reader(self.sessions.lanes.descriptor)
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        return self._end()

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        if self._manager is not None:
            loop.add_signal_handler(signal.SIGUSR1, self._hand_over)
            # The hang-up of a terminal reaches this process too. It is for the keeper, if there is one.
            loop.add_signal_handler(signal.SIGHUP, (lambda: None) if RESTARTS in os.environ else self._hand_over)

    def _hand_over(self) -> None:
        """End in order, so that a new process takes over."""
        self.dispatcher.restarting = True
        self._stop.set()

    async def _outlast(self, server: grpc.aio.Server) -> None:
        """Let a new process take over if a server ends by itself, as gRPC's do after an error where they accept calls:
        its address would stay closed."""
        error: Exception | None = None
        try:
            # If this is cancelled, the server is to be stopped yet.
            await asyncio.shield(server.wait_for_termination())
        except Exception as raised:
            error = raised
        if not self._stop.is_set():
            logger.critical("a gRPC server has ended by itself, and with it this process: %r", error)
            self._server_ended = True
            self._hand_over()

    def _report_restart(self) -> RestartReport:
        """Log how this process began, and return that."""
        now = time.monotonic()
        # systemd does not say when the process before ended. It starts the next one at once.
        down_s = now - float(os.environ.get(ENDED_AT) or _process_start_s())
        missing = "; ".join(map(str, self._not_open.values()))
        report = replace(self.core.report, down_s=down_s, take_over_s=now - self._started_s, missing=missing)
        early = os.environ.get(ENDED_EARLY, "")
        section = self.core.kept.table.section(Section.RESTARTS)
        report = count_restart(section, report, early.split(",") if early else ())
        if report.summary:
            lossless = report.outcome != REFUSED and not report.lost.sequences and not missing
            logger.log(logging.INFO if lossless else logging.WARNING, "%s", report.summary)
        return report

    def _end(self) -> int:
        """Leave the state for the next process, if there was no fault. Returns the exit status."""
        self.core.close()
        if self.device.fault is not None:
            logger.info("stopped")
            return EXIT_FAULT
        self.engine.manager.save_steps()
        self.core.kept.mark_clean()
        if self._server_ended:
            return EXIT_REFUSED  # a crash, after which the next process goes on
        if self.dispatcher.restarting and self._manager is not None:
            self._manager.send(HANDOVER)
        logger.info("stopped%s", ", the next process goes on" if self.dispatcher.restarting else "")
        return 0

    def _listen(self, cleanup: contextlib.ExitStack) -> None:
        """Open the addresses. One that a later process of the daemon cannot have is tried again, because the state is
        worth more; the operator's door always is. Raises ConfigError in the first process."""
        cleanup.callback(self._leave_paths)
        for option, address in self._addresses.items():
            if address:
                try:
                    self._open(option, cleanup)
                except ConfigError as error:
                    if not self._follows_another and option != DOOR:
                        raise
                    self._not_open[option] = error
                    logger.error("%s; it is tried again each %g s", error, LISTEN_AGAIN_S)
        if self._config.unix_socket and not self._addresses[DOOR]:
            message = "%s.own has over %d bytes, too many for a socket: there is no door for the operator alone"
            logger.warning(message, self._config.unix_socket, MAX_SOCKET_PATH_BYTES)

    @property
    def _follows_another(self) -> bool:
        """Whether there was a process of this daemon before."""
        return self.core.report.outcome != FIRST_START or os.environ.get(RESTARTS, "0") != "0"

    def _open(self, option: str, cleanup: contextlib.ExitStack) -> None:
        """Listen on the address of an option. Raises ConfigError."""
        config, kept = self._config, self._kept_sockets
        if option == "http_address":
            self._serve_http(listen_http(config.http_address, kept, cleanup))
            return
        num_slots = len(self._slots)
        try:
            if option == "unix_socket":
                server = self._server(LocalCallers(Door.UNIX, self._tenants), config.connection_limit)
                bound = listen_unix(server, config, self.sessions.fd_server, kept, cleanup)
                self._connections.add_unix(config.unix_socket, bound)
                self.peers.watch_unix(bound)
                paths = filter(None, (config.unix_socket, config.fd_socket))
                self._paths |= {path: os.lstat(path) for path in paths}
            elif option == DOOR:
                server = self._server(LocalCallers(Door.OWN, self._tenants), DOOR_CONNECTIONS)
                listen_door(server, self._addresses[DOOR])
                self._paths[self._addresses[DOOR]] = os.lstat(self._addresses[DOOR])
            else:
                server = self._server(self._remote_callers, config.connection_limit)
                credentials = self.credentials.for_server()
                address = listen_tcp(server, config.tcp_address, credentials, kept, cleanup)
                self._connections.add_tcp(address)
                self.peers.watch_tcp(address)
        except ConfigError:
            del self._slots[num_slots:]
            raise
        self._servers.append(server)

    async def _listen_again(self, cleanup: contextlib.ExitStack) -> None:
        """Serve the fd-passing socket, if there is one, and first open the addresses that this process could not have
        at its start. Runs until cancelled if there are such ones."""
        beside: list[asyncio.Task[None]] = []
        try:
            while self._not_open:
                await asyncio.sleep(LISTEN_AGAIN_S)
                for option in [*self._not_open]:
                    num_servers = len(self._servers)
                    with contextlib.suppress(ConfigError):
                        self._open(option, cleanup)
                        del self._not_open[option]
                        for server in self._servers[num_servers:]:
                            await server.start()
                            beside.append(asyncio.create_task(self._slots[-1].end_stalled()))
                            beside.append(asyncio.create_task(self._outlast(server)))
                        logger.warning("%s is open now: %s", option, self._addresses[option])
            await self.sessions.fd_server.serve()
            await asyncio.gather(*beside)
        finally:
            for task in beside:
                task.cancel()

    def _leave_paths(self) -> None:
        """Remove the paths of the unix sockets, unless a process of this daemon follows."""
        follows = self.dispatcher.restarting
        if self._manager is not None:
            follows |= self.device.fault is not None or (self._follows_another and not self._stop.is_set())
        for path, made in self._paths.items():
            if not follows:
                remove_own(path, made)

    def _serve_http(self, listening: socket.socket) -> None:
        self.observing.serve_http(listening)
        address = with_port(self._config.http_address, listening.getsockname()[1])
        logger.info("the page and /metrics are at %s://%s/", "https" if self._config.tls_cert else "http", address)

    def _server(self, callers: Callers, max_connections: int) -> grpc.aio.Server:
        config = self._config
        slots = Slots(config)
        self._slots.append(slots)
        server = grpc.aio.server(
            interceptors=callers.interceptors,
            options=server_options(config, max_connections, is_reserved=self._kept_sockets.is_kept),
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
        restarting = self.dispatcher.restarting
        reason = "a new process of the daemon takes over" if restarting else "the daemon is shutting down"
        self._set_health(self.integrity.failure or reason)
        logger.info("draining: %s", reason)
        loop = asyncio.get_running_loop()
        stall_s = self._config.drain_stall_s
        if restarting:  # the next process finds the steps that wait for their clients
            stall_s = min(stall_s, HAND_OVER_STALL_S)
        begun_s = loop.time()
        drain = Drain(self._config.drain_timeout_s, stall_s, begun_s)
        while drain.goes_on(loop.time(), self.dispatcher.in_flight, self.sessions.layers_in_progress()):
            await asyncio.sleep(0.005 if restarting else 0.02)
        if restarting:
            self.sessions.end_streams(RestartingError(reason))
        elif self.chain is not None:  # the memory ends with the keeper
            if self.pool_tier is not None:
                await self.pool_tier.flush(max(0.0, begun_s + self._config.drain_timeout_s - loop.time()) / 2)
            await self.chain.flush(max(0.0, begun_s + self._config.drain_timeout_s - loop.time()))


def _open_tracer(config: ServeConfig) -> Tracer | None:
    """Open the tracer, if one is configured. Raises ConfigError if OpenTelemetry is not installed, and
    InvalidArgumentError for an invalid endpoint."""
    if not config.otel_endpoint:
        return None
    try:
        from kvservice.server.rpc.tracing import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: traces need kvservice[otel]", field="otel_endpoint") from None
    return Tracer(config.otel_endpoint, config.otel_sample_ratio)


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("a part of the daemon has ended by an error", exc_info=error)


def _process_start_s() -> float:
    """Return when this process was started, in seconds of the monotonic clock."""
    stat = Path("/proc/self/stat").read_bytes()
    start_s = int(stat.rpartition(b")")[2].split()[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_s)


class _StatusHandler(logging.Handler):
    """Tells the manager how far the allocation of memory is, which may take most of a start."""

    def __init__(self, manager: Notifier) -> None:
        super().__init__()
        self._manager = manager

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._manager.send(f"STATUS={record.getMessage()}")


async def _main(config: ServeConfig, taken: dict[str, int], manager: Notifier | None) -> int:
    return await KVServer(config, KeptFiles(taken, manager), manager).serve()


def run(config: ServeConfig) -> int:
    """Run a daemon in this process until a signal or a fault ends it. Returns the exit status. Raises ConfigError and
    other KVServiceErrors if it cannot start."""
    logs.configure(config.log_level, config.log_format)
    raise_file_limit(config)
    try:
        taken, manager, standby = taken_descriptors(), Notifier.from_environment(), Standby.from_environment()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the keeper or systemd of this process cannot be used: {error}", field="NOTIFY_SOCKET"
        ) from None
    if standby is not None:
        try:
            taken = stand_by(config, standby, taken)
        except StandbyEndedError as error:
            logger.error("%s", error)
            return EXIT_REFUSED
    if manager is not None:
        logging.getLogger("kvservice.pool").addHandler(_StatusHandler(manager))
    return uvloop.run(_main(config, taken, manager))


class Drain:
    """Decides how long a draining daemon waits for work in progress.

    A drain waits for calls in flight, and for open steps as long as their layers arrive within `stall_s` of each
    other, but never longer than `timeout_s`. The caller passes the time, in seconds of a monotonic clock.
    """

    def __init__(self, timeout_s: float, stall_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._begun_at = now
        # For each session id: the number of written layers, and the time of its last change.
        self._seen: dict[int, tuple[int, float]] = {}

    def goes_on(self, now: float, calls_in_flight: int, layers_written: Mapping[int, int]) -> bool:
        """Return whether to keep waiting. `layers_written` maps the id of each attached session with partly written
        steps to the number of layers written in these steps."""
        if now - self._begun_at > self._timeout_s:
            logger.warning("still busy after %g s of draining", self._timeout_s)
            return False
        self._seen = {
            session_id: (count, self._since(session_id, count, now)) for session_id, count in layers_written.items()
        }
        if calls_in_flight or any(now - since <= self._stall_s for _, since in self._seen.values()):
            return True
        if self._seen:
            logger.warning(
                "no layer for %g s: no more waiting for half-written steps, sessions %s", self._stall_s, [*self._seen]
            )
        return False

    def _since(self, session_id: int, count: int, now: float) -> float:
        before, since = self._seen.get(session_id, (None, now))
        return since if before == count else now


# ---- a new process that waits to take over from the running one: what can be done before


class StandbyEndedError(Exception):
    """This process does not take over."""


def stand_by(config: ServeConfig, standby: Standby, taken: dict[str, int]) -> dict[str, int]:
    """Check that this process can take over the state whose descriptors are `taken`, and wait until it shall. Returns
    the descriptors that are kept then. Raises StandbyEndedError.

    The state is only read, because its process still runs.
    """
    try:
        refused = _refusal(config, taken)
        if refused:
            standby.refuse(refused)
            raise StandbyEndedError(f"this process cannot take over: {refused}")
        return standby.wait_for_go()
    except EOFError as error:
        raise StandbyEndedError(str(error)) from None
    finally:
        for descriptor in taken.values():
            os.close(descriptor)


def _refusal(config: ServeConfig, taken: dict[str, int]) -> str:
    """Return why this process cannot take over, or an empty text."""
    try:
        check_addresses(config)
        check_mooncake(config)
        check_free(config, taken)
        Credentials(config)
        if refused := KeptState.check(KeptFiles(taken, None), state_identity(config)):
            return refused
        prepare_device(config)
    except KVServiceError as error:
        return str(error)
    return ""
