"""How large tiers should be: traces of requests, what they reuse, and what a tier holds and saves."""

from kvservice.planning.plan import Gpu, Plan, PlanOptions, find_gpu, make_plan, render, to_json
from kvservice.planning.trace import ConversationLoad, Trace, TracedRequest, read_trace, synthetic_trace

__all__ = [
    "ConversationLoad",
    "Gpu",
    "Plan",
    "PlanOptions",
    "Trace",
    "TracedRequest",
    "find_gpu",
    "make_plan",
    "read_trace",
    "render",
    "synthetic_trace",
    "to_json",
]
