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
from collections.abc import Callable, Iterable, Iterator
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
    """Calls of a session over its stream and unary, and those of tasks. Nothing is traced that nobody wants traced."""
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("a client that traces nothing")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    options = POOL | {"num_blocks": 64}
    with Daemon(otel_endpoint=collector.endpoint, otel_sample_ratio=0.0, **options) as daemon:
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
                    kv.allocate(PROMPT * 90)
            with unsampled.start_as_current_span("not traced"):
                client.stats()
                kv.describe()
            session_id = kv.session_id
            call_unary(daemon.address, (kv.token, b"none"), parent)
            kv.close()
        tasks = asyncio.run(work_in_tasks(daemon.address))
        spans = spans_of_ended(daemon, collector)
    by_trace: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        by_trace.setdefault(int.from_bytes(span.trace_id, "big"), []).append(span)
    of_request = by_trace.pop(request.get_span_context().trace_id)
    told = [(name_of(span), attributes(span.attributes)) for span in of_request]
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
    for span in of_request:
        above = parents.get(name_of(span), request).get_span_context()
        assert int.from_bytes(span.parent_span_id, "big") == above.span_id
    of_unary = by_trace.pop(int(parent.split("-")[1], 16))
    assert {span.parent_span_id.hex() for span in of_unary} == {parent.split("-")[2]}
    told_unary = [attributes(span.attributes) for span in of_unary]
    assert [name_of(span) for span in of_unary] == ["Free", "Free"]
    assert {of["rpc.response.status_code"] for of in told_unary} == {"NOT_FOUND"}
    assert {of["kvservice.transport"] for of in told_unary} == {"unary"}
    assert [of.get("kvservice.session_id") for of in told_unary] == [session_id, None]
    for span_id, trace_id in tasks.items():
        of_task = by_trace.pop(trace_id)
        assert sorted(name_of(span) for span in of_task) == ["Allocate", "Describe"]
        assert {int.from_bytes(span.parent_span_id, "big") for span in of_task} == {span_id}
    assert by_trace == {}
    assert_silent("".join(map(str, collector.received)), [kv.token])


def call_unary(address: str, tokens: Iterable[bytes], traceparent: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub: Any = blocks_pb2_grpc.BlockServiceStub(channel)
        for token in tokens:
            with pytest.raises(grpc.RpcError):
                stub.Free(
                    blocks_pb2.FreeRequest(session_token=token, sequence_ids=[1]),
                    metadata=[("traceparent", traceparent)],
                )


async def work_in_tasks(address: str) -> dict[int, int]:
    """Make calls in tasks with traces of their own. Returns the trace ids by the ids of the tasks' spans."""
    async with AsyncKVClient(address) as client, client.session() as kv:

        async def work(number: int) -> tuple[int, int]:
            with TRACER.start_as_current_span(f"task {number}") as span:
                await kv.allocate([number], sequence_id=number)
                await kv.describe()
                return span.get_span_context().span_id, span.get_span_context().trace_id

        return dict(await asyncio.gather(*map(work, range(8))))


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
            for _ in range(30):
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
    refusals = [line for line in lines if "method" in line]
    told = [(line["method"], line["status"], line["session_id"], line["request_id"]) for line in refusals]
    (allocate, describe, free, unknown) = told
    assert allocate[:3] == ("allocate", "RESOURCE_EXHAUSTED", session_id)
    assert allocate[3] > 0
    assert describe == ("describe", "NOT_FOUND", session_id, 0)
    assert free == ("free", "NOT_FOUND", session_id, 2**64 - 1)
    assert unknown == ("free", "NOT_FOUND", None, 0)
    assert [line["session_id"] for line in lines if line["message"].startswith("session ")] == [session_id] * 2
    assert_silent(text, [kv.token, http_token.encode(), b"an unknown token"])
