"""The observer's main loop: it gets its configuration, reads once per second, answers requests, and ends with the
daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvservice import logs
from kvservice.auth import CertificateFiles, Certificates, Reloading, is_loopback
from kvservice.kept.report import RestartReport
from kvservice.metrics import (
    about_metrics,
    access_metrics,
    call_metrics,
    event_loop_metrics,
    holder_metrics,
    pool_metrics,
    restart_metrics,
    scheduler_metrics,
    spill_metrics,
    store_metrics,
    tier_metrics,
    transfer_metrics,
)
from kvservice.observer.history import History
from kvservice.observer.http_server import Connections, HttpLimits, serve_http
from kvservice.observer.views import Views
from kvservice.observer.web_api import FRESH_S, HttpOptions, Refusals, make_app
from kvservice.telemetry.arrays import open_arrays
from kvservice.telemetry.link import (
    BLOCK_HASH,
    WRITE_STATS,
    Asker,
    answer_all,
    asked_snapshot,
    open_link,
    receive,
    send,
)
from kvservice.telemetry.reading import Reader, Reading
from kvservice.telemetry.tables import BUCKETS_S
from kvservice.v1 import inspect_pb2

logger = logging.getLogger(__name__)

READ_EVERY_S = 1.0
DEFAULT_ROWS = 100


class Observer:
    def __init__(
        self, memory: int, asking: socket.socket, answering: socket.socket, http: socket.socket | None
    ) -> None:
        """`memory` is a descriptor of the daemon's arrays. `asking` and `answering` are links to the daemon. `http` is
        a listening socket."""
        self._memory, self._asking, self._answering, self._http = memory, asking, answering, http
        self._loop_counts, self._loop_seconds = [0] * (len(BUCKETS_S) + 1), 0.0
        self._refusals = Refusals()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Run until the daemon ends or an error occurs. After an error the daemon starts a new observer."""
        self._asker = Asker(*await open_link(self._asking))
        reader, writer = await open_link(self._answering)
        self._configure(json.loads((await receive(reader))[1:]))
        await self._read()
        send(writer, b"")
        tasks = [answer_all(reader, writer, self._answer), self._read_on()]
        if self._http is not None:
            tasks.append(self._serve_http(self._http))
        done, _ = await asyncio.wait(map(asyncio.ensure_future, tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (error := task.exception()) is not None and not isinstance(error, ConnectionError):
                logger.error("the observer failed", exc_info=error)
        # Exit without closing connections in an orderly way: no more data will come.
        os._exit(0)

    def _configure(self, configuration: dict[str, Any]) -> None:
        """Apply the daemon's configuration; see `configuration` of kvservice.server.watching.observing."""
        logs.configure(configuration["log_level"], configuration["log_format"])
        self._configuration = configuration
        arrays = open_arrays(self._memory, configuration["manifest"])
        restart = RestartReport.from_json(configuration["restart"])
        self._reader = Reader(arrays, configuration["methods"], configuration["started_s"], restart)
        self._history = History(self._reader.call_keys, configuration["info"]["block_bytes"])
        self._views = Views(arrays, self._reader, self._history, configuration["info"], self._fresh, self._block_hash)
        self._registry = CollectorRegistry(auto_describe=False)
        # The process metrics are those of the daemon, the parent process.
        ProcessCollector(pid=os.getppid, registry=self._registry)
        self._registry.register(_Metrics(self._collect))

    async def _answer(self, question: bytes) -> bytes:
        asked, part = asked_snapshot(question)
        request = inspect_pb2.GetSnapshotRequest.FromString(asked)
        rows = request.max_sessions or DEFAULT_ROWS, request.max_sequences or DEFAULT_ROWS
        fields = await self._views.snapshot(*rows, request.search, part)
        return inspect_pb2.Snapshot(**fields).SerializeToString()

    async def _fresh(self) -> Reading:
        """Return a reading with current gauges, or with the last ones of a daemon that does not answer."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ask(), FRESH_S)
        return self._reader.read()

    async def _ask(self) -> None:
        """Ask the daemon's event loop to write current gauges, and wait until it has."""
        await self._asker.ask(WRITE_STATS)
        self._answered_at = time.monotonic()

    async def _block_hash(self, block: int) -> bytes:
        return await self._asker.ask(BLOCK_HASH + block.to_bytes(8, "little"))

    async def _read(self) -> None:
        start = time.perf_counter()
        await self._ask()
        seconds = time.perf_counter() - start
        self._loop_counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._loop_seconds += seconds
        self._history.add(self._reader.read(), time.time())

    async def _read_on(self) -> None:
        while True:
            await asyncio.sleep(READ_EVERY_S)
            await self._read()

    async def _serve_http(self, listening: socket.socket) -> None:
        configuration = self._configuration
        options = HttpOptions(
            is_loopback(configuration["http_host"]), configuration["http_token"], configuration["metrics_token"]
        )
        app = make_app(self._views, options, self._metrics, self._refusals)
        certificates = None
        if configuration["tls_cert"]:
            files = CertificateFiles(Path(configuration["tls_cert"]), Path(configuration["tls_key"]))
            certificates = Reloading(files.paths, lambda: Certificates.read(files), "HTTP")
        await serve_http(app, listening, Connections(HttpLimits()), certificates)

    async def _metrics(self) -> tuple[bytes, str]:
        self._scraped = await self._fresh()
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _collect(self) -> Iterator[Metric]:
        configuration, info, reading = self._configuration, self._configuration["info"], self._scraped
        yield from about_metrics(info)
        yield from restart_metrics(self._reader.restart)
        yield from pool_metrics(reading, info["block_bytes"], configuration["memory_bytes"])
        yield from holder_metrics(reading, configuration["max_labels"], info["max_sessions"], info["max_sequences"])
        yield from scheduler_metrics(reading)
        yield from store_metrics(reading)
        yield from tier_metrics(reading)
        yield from spill_metrics(reading)
        yield from transfer_metrics(reading)
        yield from access_metrics(reading.server, self._refusals.counts, configuration["max_connections"])
        yield from call_metrics(reading, self._reader.call_keys, configuration["lane_buckets_s"])
        yield from event_loop_metrics(self._loop_counts, self._loop_seconds, time.monotonic() - self._answered_at)


class _Metrics(Collector):
    def __init__(self, metrics: Callable[[], Iterator[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics()
