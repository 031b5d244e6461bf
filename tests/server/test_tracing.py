"""Spans as received by a collector."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_collector import Collector, attributes

from kvservice import __version__
from kvservice.errors import InvalidArgumentError
from kvservice.server.tracing import Tracer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def traced(collector: Collector, *traceparents: str, ratio: float = 1.0, status: str = "OK") -> list[Span]:
    tracer = Tracer(collector.endpoint, ratio)
    for traceparent in traceparents:
        tracer.begin("can_allocate", "stream", traceparent).end(status, 17)
    tracer.close()
    return collector.spans


def test_a_span_says_which_call_it_was_and_no_more(collector: Collector) -> None:
    (span,) = traced(collector, "")
    assert span.name == "kvservice.v1.BlockService/CanAllocate"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert attributes(span.attributes) == {
        "rpc.system.name": "grpc",
        "rpc.method": "kvservice.v1.BlockService/CanAllocate",
        "rpc.response.status_code": "OK",
        "kvservice.transport": "stream",
        "kvservice.session_id": 17,
    }
    assert span.parent_span_id == b""
    assert span.start_time_unix_nano < span.end_time_unix_nano
    assert not span.events


def test_the_daemon_says_who_it_is(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    traced(collector, "")
    resource = attributes(collector.received[0].resource.attributes)
    assert resource["service.name"] == "kvservice"
    assert resource["service.version"] == __version__
    assert resource["deployment.environment.name"] == "staging"


def test_the_name_of_the_service_can_be_set_as_everywhere(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kv-of-the-east")
    traced(collector, "")
    assert attributes(collector.received[0].resource.attributes)["service.name"] == "kv-of-the-east"


def test_the_callers_trace_goes_on(collector: Collector) -> None:
    (span,) = traced(collector, SAMPLED, ratio=0.0)
    assert span.trace_id.hex() == TRACE_ID
    assert span.parent_span_id.hex() == PARENT_ID


def test_what_the_caller_does_not_trace_is_not_traced(collector: Collector) -> None:
    assert traced(collector, NOT_SAMPLED, ratio=1.0) == []


@pytest.mark.parametrize("traceparent", ["nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", "00-" + "x" * 5000, "\n\0"])
def test_a_wrong_parent_is_none(collector: Collector, traceparent: str) -> None:
    (span,) = traced(collector, traceparent)
    assert span.trace_id.hex() != TRACE_ID
    assert span.parent_span_id == b""


def test_the_ratio_decides_for_calls_without_a_parent(collector: Collector) -> None:
    assert traced(collector, *[""] * 200, ratio=0.0) == []
    spans = traced(collector, *[""] * 1000, ratio=0.5)
    # The count is outside this range by chance with a probability below 1e-9.
    assert 400 < len(spans) < 600
    assert len({span.trace_id for span in spans}) == len(spans)


@pytest.mark.parametrize(
    ("status", "is_error"),
    [("OK", False), ("NOT_FOUND", False), ("RESOURCE_EXHAUSTED", False), ("INTERNAL", True), ("UNAVAILABLE", True)],
)
def test_only_a_failure_of_the_daemon_is_an_error(collector: Collector, status: str, is_error: bool) -> None:
    (span,) = traced(collector, "", status=status)
    found = attributes(span.attributes)
    assert found["rpc.response.status_code"] == status
    assert (span.status.code == Status.STATUS_CODE_ERROR) is is_error
    assert found.get("error.type") == (status if is_error else None)


def test_a_call_that_is_no_rpc_and_without_a_session(collector: Collector) -> None:
    tracer = Tracer(collector.endpoint, 1.0)
    tracer.begin("attach", "stream", "").end("OK", None)
    tracer.close()
    (span,) = collector.spans
    assert span.name == "attach"
    assert "kvservice.session_id" not in attributes(span.attributes)


def test_spans_are_sent_while_the_daemon_runs(collector: Collector) -> None:
    tracer = Tracer(collector.endpoint, 1.0)
    tracer.begin("ping", "unary", "").end("OK", None)
    assert collector.arrived.wait(30)
    tracer.close()


def test_a_collector_that_is_silent_does_not_hold_the_end() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        tracer = Tracer(f"http://127.0.0.1:{mute.getsockname()[1]}", 1.0)
        for _ in range(3000):
            tracer.begin("ping", "unary", "").end("OK", None)
        closing = threading.Thread(target=tracer.close)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://collector:4317", "http://"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match="otel_endpoint"):
        Tracer(endpoint, 1.0)


def test_nothing_of_opentelemetry_is_imported_unless_it_is_wanted() -> None:
    code = (
        "import sys, kvservice.server.daemon; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0
