"""A client of a Mooncake Store in a process of its own, and a node that gives memory to such a store.

The library is imported in these processes only, so the daemon goes on if it crashes or hangs.
kvservice.tiers.mooncake is the daemon's side.
"""

from kvservice.mooncake.listening import (
    NOWHERE,
    PRELOADED,
    ListeningError,
    check_listening,
    listening_environment,
    numeric_address,
)
from kvservice.mooncake.messages import (
    FRAME_BYTES,
    LENGTH,
    STAGED_BYTES,
    MooncakeReply,
    MooncakeRequest,
    Operation,
    Outcome,
    Status,
    values_in_request,
)
from kvservice.mooncake.options import MooncakeOptions

__all__ = [
    "FRAME_BYTES",
    "LENGTH",
    "NOWHERE",
    "PRELOADED",
    "STAGED_BYTES",
    "ListeningError",
    "MooncakeOptions",
    "MooncakeReply",
    "MooncakeRequest",
    "Operation",
    "Outcome",
    "Status",
    "check_listening",
    "listening_environment",
    "numeric_address",
    "values_in_request",
]
