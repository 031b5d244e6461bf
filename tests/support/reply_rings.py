"""Replies of sessions, in memory of their own."""

from __future__ import annotations

from kvservice.kept import KeptState
from kvservice.server.sessions.replies import KeptReplies, Replies


def no_replies() -> Replies:
    """Return the replies of a new session."""
    return Replies(KeptReplies(1, KeptState.fresh().arrays).ring(0))
