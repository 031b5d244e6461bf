"""Spans of calls, sent to an OpenTelemetry collector. Imported only where it is wanted: it needs the extra `otel`.

A span says which call it was, how it ended and how long it took, after OpenTelemetry's conventions for RPCs. It tells
nothing of what the call carried, nor what clients call themselves.
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
from kvservice.server.contract import SERVICES, call_name

# Spans that wait to be sent; later ones are dropped.
_QUEUE_SPANS = 2048
_BATCH_SPANS = 1024
_BATCH_DELAY_MS = 1000
# An export with all its retries. At the end there are at most three: one under way, and the queue's two.
_EXPORT_TIMEOUT_S = 2.0

_RPC_NAMES: Final = {
    call_name(method.name): f"{service.full_name}/{method.name}" for service in SERVICES for method in service.methods
}
# With these it was the server that failed, by the conventions; with others the caller did.
_SERVER_ERRORS: Final = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_NO_PARENT: Final = Context()


class Span:
    """A call under way."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def end(self, status: str, session_id: int | None) -> None:
        """`status`: the name of the gRPC status; `session_id`: None for a call that needs no session."""
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
    """`endpoint`: http:// or https:// and host:port of a collector. Of the calls that come without a decision of their
    caller, `sample_ratio` are traced.

    Sends from a thread of its own. What OpenTelemetry reads of the environment (headers, certificates, attributes of
    the resource) holds here too. Raises InvalidArgumentError.
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

    def begin(self, method: str, transport: str, traceparent: str) -> Span:
        """`traceparent`: the W3C header that came with the call, or nothing; a wrong one counts as nothing."""
        name = _RPC_NAMES.get(method, method)
        parent = self._propagator.extract({"traceparent": traceparent}, _NO_PARENT) if traceparent else _NO_PARENT
        attributes = {"rpc.system.name": "grpc", "rpc.method": name, "kvservice.transport": transport}
        return Span(self._tracer.start_span(name, parent, trace.SpanKind.SERVER, attributes))

    def close(self) -> None:
        """Send what waits, for a few seconds at most. Blocks."""
        self._provider.shutdown()
