"""Spans as received by a collector, of the calls of a daemon without its server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from daemon_lives import Life
from each_row import each_row
from manual_clock import ManualClock
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_collector import Collector, attributes

from kvservice import __version__
from kvservice.errors import InvalidArgumentError, KVServiceError
from kvservice.v1 import blocks_pb2, pool_pb2

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@contextlib.contextmanager
def tracing(endpoint: str, ratio: float = 1.0) -> Iterator[Life]:
    """Yield a daemon that traces its calls. All spans are exported at its end."""
    clock = ManualClock()
    life = Life(clock=clock, store_gib=0.0, share_store="off", otel_endpoint=endpoint, otel_sample_ratio=ratio)
    try:
        yield life
    finally:
        clock.close()
        assert life.dispatcher.tracer is not None
        life.dispatcher.tracer.close()
        life.kill()


def call(life: Life, method: str, request: Any, session: Any = None, traceparent: str = "") -> None:
    """Make a call over a stream. Its error is of no interest."""
    with contextlib.suppress(KVServiceError):
        asyncio.run(life.dispatcher.call(method, request, session, "stream", True, traceparent))


def pinged(collector: Collector, *traceparents: str, ratio: float = 1.0) -> list[Span]:
    """Return the spans of calls with these parents."""
    before = len(collector.spans)
    with tracing(collector.endpoint, ratio) as life:
        for traceparent in traceparents:
            call(life, "ping", pool_pb2.PingRequest(), traceparent=traceparent)
    return collector.spans[before:]


def test_a_span_says_which_call_it_was_and_no_more(collector: Collector) -> None:
    with tracing(collector.endpoint) as life:
        session = life.open()
        prompt = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[1])
        call(life, "can_allocate", blocks_pb2.CanAllocateRequest(sequences=[prompt]), session)
    (span,) = collector.spans
    assert span.name == "kvservice.v1.BlockService/CanAllocate"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert attributes(span.attributes) == {
        "rpc.system.name": "grpc",
        "rpc.method": "kvservice.v1.BlockService/CanAllocate",
        "rpc.response.status_code": "OK",
        "kvservice.transport": "stream",
        "kvservice.session_id": session.session_id,
    }
    assert span.parent_span_id == b""
    assert span.start_time_unix_nano < span.end_time_unix_nano
    assert not span.events


def test_the_daemon_says_who_it_is(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the service can be set as everywhere."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    pinged(collector, "")
    resource = attributes(collector.received[0].resource.attributes)
    assert resource["service.name"] == "kvservice"
    assert resource["service.version"] == __version__
    assert resource["deployment.environment.name"] == "staging"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kv-of-the-east")
    pinged(collector, "")
    assert attributes(collector.received[-1].resource.attributes)["service.name"] == "kv-of-the-east"


def test_the_callers_trace_goes_on(collector: Collector) -> None:
    (span,) = pinged(collector, SAMPLED, ratio=0.0)
    assert span.trace_id.hex() == TRACE_ID
    assert span.parent_span_id.hex() == PARENT_ID
    assert pinged(collector, NOT_SAMPLED, ratio=1.0) == [], "the caller does not trace it"


def test_a_wrong_parent_is_none(collector: Collector) -> None:
    parents = ("nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", "00-" + "x" * 5000, "\n\0")
    spans = pinged(collector, *parents)
    assert len(spans) == len(parents)
    assert TRACE_ID not in [span.trace_id.hex() for span in spans]
    assert {span.parent_span_id for span in spans} == {b""}


def test_the_ratio_decides_for_calls_without_a_parent(collector: Collector) -> None:
    assert pinged(collector, *[""] * 200, ratio=0.0) == []
    spans = pinged(collector, *[""] * 1000, ratio=0.5)
    # The count is outside this range by chance with a probability below 1e-9.
    assert 400 < len(spans) < 600
    assert len({span.trace_id for span in spans}) == len(spans)


def test_only_a_failure_of_the_daemon_is_an_error(collector: Collector) -> None:
    with tracing(collector.endpoint) as life:
        session = life.open()
        call(life, "describe", blocks_pb2.DescribeRequest(), session)
        call(life, "free", blocks_pb2.FreeRequest(sequence_ids=[1]), session)
        prompts = [blocks_pb2.SequenceAllocation(sequence_id=n, token_ids=range(500)) for n in range(2)]
        call(life, "allocate", blocks_pb2.AllocateRequest(sequences=prompts), session)
        life.dispatcher.draining = True
        call(life, "allocate", blocks_pb2.AllocateRequest(), session)
        session.namespace = None
        call(life, "describe", blocks_pb2.DescribeRequest(), session)
    found = []
    for span in collector.spans:
        of = attributes(span.attributes)
        found.append((of["rpc.response.status_code"], of.get("error.type")))
        assert (span.status.code == Status.STATUS_CODE_ERROR) is ("error.type" in of)
    assert found == [
        ("OK", None),
        ("NOT_FOUND", None),
        ("RESOURCE_EXHAUSTED", None),
        ("UNAVAILABLE", "UNAVAILABLE"),
        ("INTERNAL", "INTERNAL"),
    ]


def test_spans_are_sent_while_the_daemon_runs(collector: Collector) -> None:
    """Also that of a call that is no RPC and has no session."""
    with tracing(collector.endpoint) as life:
        assert life.dispatcher.tracer is not None
        life.dispatcher.tracer.begin("attach", "stream", "").end("OK", None)
        assert collector.arrived.wait(30)
    (span,) = collector.spans
    assert span.name == "attach"
    assert "kvservice.session_id" not in attributes(span.attributes)


@pytest.mark.slow
def test_a_collector_that_is_silent_does_not_hold_the_end() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with tracing(f"http://127.0.0.1:{mute.getsockname()[1]}") as life:
            tracer = life.dispatcher.tracer
            assert tracer is not None
            for _ in range(3000):
                tracer.begin("ping", "unary", "").end("OK", None)
            closing = threading.Thread(target=tracer.close)
            closing.start()
            closing.join(20)
            assert not closing.is_alive()


def test_an_endpoint_that_is_none_is_refused() -> None:
    with each_row() as row:
        for endpoint in ("collector:4317", "ftp://collector:4317", "http://"):
            with row(endpoint), pytest.raises(InvalidArgumentError, match="otel_endpoint"):
                Life(otel_endpoint=endpoint)


def test_nothing_of_opentelemetry_is_imported_unless_it_is_wanted() -> None:
    code = (
        "import sys, kvservice.server.daemon; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0
