"""Traces of calls, sent to an OpenTelemetry collector. Imported only if traces are enabled: it needs the extra `otel`.

A span records the method, the status and the duration of a call, following OpenTelemetry's conventions for RPCs. It
contains neither data of the call nor the names of clients.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvservice import __version__
from kvservice.errors import InvalidArgumentError
from kvservice.server.rpc.contract import SERVICES, call_name

# The size of the export queue; spans that do not fit are dropped.
_QUEUE_SPANS = 2048
_BATCH_SPANS = 1024
_BATCH_DELAY_MS = 1000
# The timeout of one export including retries. At shutdown there are at most three exports: one in flight, and two
# batches in the queue.
_EXPORT_TIMEOUT_S = 2.0

_RPC_NAMES: Final = {
    call_name(method): f"{service.full_name}/{method.name}" for service in SERVICES for method in service.methods
}
# The statuses that the conventions classify as errors of the server.
_SERVER_ERRORS: Final = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_NO_PARENT: Final = Context()


class CallSpan:
    """The span of a call in flight."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def end(self, status: str, session_id: int | None) -> None:
        """End the span. `status` is the name of the gRPC status; `session_id` is None for a call without a session."""
        span = self._span
        if not span.is_recording():
            return
        span.set_attribute("rpc.response.status_code", status)
        if session_id is not None:
            span.set_attribute("kvservice.session_id", session_id)
        if status in _SERVER_ERRORS:
            span.set_attribute("error.type", status)
            span.set_status(trace.StatusCode.ERROR)
        span.end()


class Tracer:
    """Creates spans and exports them from a background thread.

    `endpoint` is the URL of a collector: http:// or https:// and host:port. `sample_ratio` is the fraction of calls
    that are traced if the caller has made no sampling decision. The environment variables of OpenTelemetry (headers,
    certificates, resource attributes) apply. Raises InvalidArgumentError.
    """

    def __init__(self, endpoint: str, sample_ratio: float) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidArgumentError("must be http://host:port or https://host:port", field="otel_endpoint")
        resource = Resource({"service.name": "kvservice", "service.version": __version__})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create().merge(resource).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, _QUEUE_SPANS, _BATCH_DELAY_MS, _BATCH_SPANS))
        self._tracer = self._provider.get_tracer("kvservice", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, transport: str, traceparent: str) -> CallSpan:
        """Start a span. `traceparent` is the W3C header of the call, or empty; an invalid header is ignored."""
        name = _RPC_NAMES.get(method, method)
        parent = self._propagator.extract({"traceparent": traceparent}, _NO_PARENT) if traceparent else _NO_PARENT
        attributes = {"rpc.system.name": "grpc", "rpc.method": name, "kvservice.transport": transport}
        return CallSpan(self._tracer.start_span(name, parent, trace.SpanKind.SERVER, attributes))

    def close(self) -> None:
        """Export the queued spans. Blocks for a few seconds at most."""
        self._provider.shutdown()
