"""The caller's trace context, for spans that the daemon adds to its trace."""

from __future__ import annotations

import sys


def traceparent() -> str:
    """The W3C header of the current span, where the process uses OpenTelemetry and there is one; else nothing."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
