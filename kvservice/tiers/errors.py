"""The error that a tier raises."""

from __future__ import annotations


class TierError(Exception):
    """A tier failed as a whole: for its users that is a miss. Clients never see this error."""
