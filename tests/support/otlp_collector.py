"""A minimal OpenTelemetry collector for traces: the OTLP service over gRPC, which stores all spans."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A context manager. `endpoint` is the address."""

    def __init__(self) -> None:
        self.received: list[ResourceSpans] = []
        self.arrived = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.received.extend(request.resource_spans)
        self.arrived.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        return [span for resource in self.received for scope in resource.scope_spans for span in scope.spans]


def attributes(pairs: Iterable[KeyValue]) -> dict[str, str | int]:
    """Return the attributes of a span or a resource."""
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
