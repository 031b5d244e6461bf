"""Replies of sessions, in memory that a test can take over."""

from __future__ import annotations

from kvservice.blocks.plans import ArrayMemory, numpy_memory
from kvservice.server.kept_replies import KeptReplies
from kvservice.server.replies import Replies


def no_replies(memory: ArrayMemory = numpy_memory) -> Replies:
    """Return the replies of a new session."""
    return Replies(KeptReplies(1, memory).ring(0))
