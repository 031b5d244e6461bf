"""Reports about calls: spans in the traces of their callers, and log lines."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from footprint import children
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from otlp_collector import Collector, attributes
from scraping import POOL, compute
from waiting import PATIENCE_S

from kvservice.client import AsyncKVClient, KVClient
from kvservice.errors import OutOfBlocksError, UnknownSequenceError
from kvservice.launch import Daemon
from kvservice.v1 import blocks_pb2, blocks_pb2_grpc, inspect_pb2, inspect_pb2_grpc

# Digits that appear in no other number.
PROMPT = [1_987_654_000 + 7 * n for n in range(10)]
TRACER = TracerProvider().get_tracer("a client")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def spans_of_ended(daemon: Daemon, collector: Collector) -> list[Span]:
    """Return all spans, after the daemon has exported them at shutdown."""
    assert daemon.stop() == 0
    return collector.spans


def name_of(span: Span) -> str:
    return span.name.rpartition("/")[2]


def test_calls_become_spans_of_their_callers_traces(collector: Collector) -> None:
    with Daemon(otel_endpoint=collector.endpoint, otel_sample_ratio=0.0, **POOL) as daemon:
        with KVClient(daemon.address, transport="inline") as client:
            kv = client.session("engine", tenant="acme")
            kept, freed = kv.allocate(PROMPT), kv.allocate([1])  # these calls belong to no trace
            with TRACER.start_as_current_span("a request") as request:
                with TRACER.start_as_current_span("a step of it") as step:
                    computing = kv.open_step([kept])
                    computing.write(*(np.ones((2, 10, 1, 32), np.float32),) * 2)
                client.stats()
                kv.free([freed])
                with pytest.raises(UnknownSequenceError):
                    kv.free([freed])
                with pytest.raises(OutOfBlocksError):
                    kv.allocate(PROMPT * 9)
            session_id = kv.session_id
            kv.close()
        spans = spans_of_ended(daemon, collector)
    told = [
        (name_of(span), attributes(span.attributes))
        for span in sorted(spans, key=lambda span: span.start_time_unix_nano)
    ]
    assert [
        (name, of["kvservice.transport"], of["rpc.response.status_code"], of.get("kvservice.session_id"))
        for name, of in told
    ] == [
        ("OpenStep", "stream", "OK", session_id),
        ("Write", "stream", "OK", session_id),
        ("GetStats", "unary", "OK", None),
        ("Free", "stream", "OK", session_id),
        ("Free", "stream", "NOT_FOUND", session_id),
        ("Allocate", "stream", "RESOURCE_EXHAUSTED", session_id),
    ]
    parents = {"OpenStep": step, "Write": step}
    for span in spans:
        parent = parents.get(name_of(span), request).get_span_context()
        assert int.from_bytes(span.trace_id, "big") == parent.trace_id
        assert int.from_bytes(span.parent_span_id, "big") == parent.span_id
    assert_silent("".join(map(str, collector.received)), [kv.token])


def test_unary_calls_of_a_session_too(collector: Collector) -> None:
    with Daemon(otel_endpoint=collector.endpoint, otel_sample_ratio=0.0, **POOL) as daemon:
        with (
            KVClient(daemon.address) as client,
            client.session() as kv,
            grpc.insecure_channel(daemon.address) as channel,
        ):
            stub: Any = blocks_pb2_grpc.BlockServiceStub(channel)
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            for token in (kv.token, b"none"):
                with pytest.raises(grpc.RpcError):
                    stub.Free(
                        blocks_pb2.FreeRequest(session_token=token, sequence_ids=[1]),
                        metadata=[("traceparent", parent)],
                    )
            session_id = kv.session_id
        spans = spans_of_ended(daemon, collector)
    assert [name_of(span) for span in spans] == ["Free", "Free"]
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in spans} == {tuple(parent.split("-")[1:3])}
    told = [attributes(span.attributes) for span in spans]
    assert {of["rpc.response.status_code"] for of in told} == {"NOT_FOUND"}
    assert {of["kvservice.transport"] for of in told} == {"unary"}
    assert [of.get("kvservice.session_id") for of in told] == [session_id, None]


def test_the_asynchronous_clients_calls_are_of_their_own_tasks_traces(collector: Collector) -> None:
    async def run(address: str) -> dict[int, int]:
        async with AsyncKVClient(address) as client, client.session() as kv:

            async def work(number: int) -> tuple[int, int]:
                with TRACER.start_as_current_span(f"task {number}") as span:
                    await kv.allocate([number], sequence_id=number)
                    await kv.describe()
                    return span.get_span_context().span_id, span.get_span_context().trace_id

            return dict(await asyncio.gather(*map(work, range(8))))

    with Daemon(otel_endpoint=collector.endpoint, otel_sample_ratio=0.0, **(POOL | {"num_blocks": 64})) as daemon:
        tasks = asyncio.run(run(daemon.address))
        spans = spans_of_ended(daemon, collector)
    found = sorted((int.from_bytes(span.parent_span_id, "big"), name_of(span)) for span in spans)
    assert found == sorted((task, name) for task in tasks for name in ("Allocate", "Describe"))
    for span in spans:
        assert tasks[int.from_bytes(span.parent_span_id, "big")] == int.from_bytes(span.trace_id, "big")


def test_nothing_is_traced_that_nobody_wants_traced(collector: Collector) -> None:
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("a client that traces nothing")
    with Daemon(otel_endpoint=collector.endpoint, otel_sample_ratio=0.0, **POOL) as daemon:
        with KVClient(daemon.address) as client, client.session() as kv:
            compute(kv, PROMPT)
            with unsampled.start_as_current_span("not traced"):
                client.stats()
                kv.describe()
        assert spans_of_ended(daemon, collector) == []


def test_the_daemon_decides_for_those_who_do_not(collector: Collector) -> None:
    with Daemon(otel_endpoint=collector.endpoint, otel_sample_ratio=1.0, **POOL) as daemon:
        with KVClient(daemon.address) as client:
            client.stats()
            with trace.use_span(trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)):
                client.ping()
        spans = spans_of_ended(daemon, collector)
    assert [name_of(span) for span in spans] == ["GetInfo", "GetStats", "Ping"]
    assert [span.parent_span_id for span in spans] == [b""] * 3


def test_calls_work_without_the_collector(free_port: int) -> None:
    options: dict[str, Any] = {"otel_endpoint": f"http://127.0.0.1:{free_port}", "otel_sample_ratio": 1.0}
    with Daemon(**options, **POOL) as daemon:
        with KVClient(daemon.address) as client, client.session() as kv:
            for _ in range(100):
                kv.free([compute(kv, [1, 2, 3])])
            assert client.stats().sequences == 0
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0


def lines_of(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.read_text().splitlines()]


def await_line(daemon: Daemon, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(condition(line) for line in lines_of(daemon)):
        assert time.monotonic() < deadline, daemon.log.read_text()
        time.sleep(0.02)


def forms_of(secret: bytes) -> list[str]:
    return [repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode(), str(list(secret))]


def assert_silent(text: str, secrets: list[bytes]) -> None:
    for secret in secrets:
        for form in forms_of(secret):
            assert form not in text
    for token_id in PROMPT:
        assert str(token_id) not in text


def test_a_log_for_machines(free_port: int) -> None:
    http_token = "a-secret-of-the-page"
    options: dict[str, Any] = {"log_format": "json", "log_level": "debug", "http_token": http_token}
    with Daemon(http_address=f"127.0.0.1:{free_port}", **options, **POOL) as daemon:
        with KVClient(daemon.address, transport="inline") as client, grpc.insecure_channel(daemon.address) as channel:
            kv = client.session("engine", tenant="acme")
            sequence = compute(kv, PROMPT)
            with pytest.raises(OutOfBlocksError):
                kv.allocate(PROMPT * 5)
            kv.free([sequence])
            with pytest.raises(UnknownSequenceError):
                kv.describe([sequence])
            blocks: Any = blocks_pb2_grpc.BlockServiceStub(channel)
            request = blocks_pb2.FreeRequest(session_token=kv.token, request_id=2**64 - 1, sequence_ids=[77])
            with pytest.raises(grpc.RpcError):
                blocks.Free(request)
            with pytest.raises(grpc.RpcError):
                blocks.Free(blocks_pb2.FreeRequest(session_token=b"an unknown token", sequence_ids=[77]))
            inspect: Any = inspect_pb2_grpc.InspectServiceStub(channel)
            inspect.GetSnapshot(inspect_pb2.GetSnapshotRequest(search=str(PROMPT[0])))
            for path in ("/metrics", "/", f"/?token={http_token}", "/api/search?q=engine", "/none"):
                ask = urllib.request.Request(f"http://127.0.0.1:{free_port}{path}")
                ask.add_header("Authorization", f"Bearer {http_token}")
                try:
                    urllib.request.urlopen(ask, timeout=20).close()
                except urllib.error.HTTPError as refused:
                    refused.close()
            with socket.create_connection(("127.0.0.1", free_port)) as garbled:
                garbled.sendall(b"no HTTP at all\r\n\r\n")
                garbled.recv(4096)
            session_id = kv.session_id
            kv.close()
            (observer,) = children(daemon.process.pid)
            os.kill(observer, signal.SIGKILL)
            await_line(daemon, lambda line: "the observer has ended" in line["message"])
        assert daemon.stop() == 0
        text, lines = daemon.log.read_text(), lines_of(daemon)

    assert not [line for line in lines if line["logger"].startswith("uvicorn")]  # nothing about garbled requests
    for line in lines:
        assert {"time", "level", "logger", "message"} <= set(line)
    refusals = [line for line in lines if line["logger"] == "kvservice.server.dispatch"]
    told = [(line["method"], line["status"], line["session_id"], line["request_id"]) for line in refusals]
    (allocate, describe, free, unknown) = told
    assert allocate[:3] == ("allocate", "RESOURCE_EXHAUSTED", session_id)
    assert allocate[3] > 0
    assert describe == ("describe", "NOT_FOUND", session_id, 0)
    assert free == ("free", "NOT_FOUND", session_id, 2**64 - 1)
    assert unknown == ("free", "NOT_FOUND", None, 0)
    assert [line["session_id"] for line in lines if line["logger"] == "kvservice.server.sessions"] == [session_id] * 2
    assert_silent(text, [kv.token, http_token.encode(), b"an unknown token"])
