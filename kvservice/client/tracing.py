"""The caller's trace context, so that the daemon's spans join the caller's trace."""

from __future__ import annotations

import sys


def traceparent() -> str:
    """Return the W3C traceparent header of the current span, or "" if there is no span or OpenTelemetry is not
    loaded."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
