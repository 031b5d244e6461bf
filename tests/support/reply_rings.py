"""Replies of sessions, in memory of their own."""

from __future__ import annotations

from kvservice.kept import KeptState
from kvservice.server.kept_replies import KeptReplies
from kvservice.server.replies import Replies


def no_replies() -> Replies:
    """Return the replies of a new session."""
    return Replies(KeptReplies(1, KeptState.fresh().arrays).ring(0))
