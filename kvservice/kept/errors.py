"""The error of this package."""


class KeptStateError(Exception):
    """State of an earlier process that cannot be taken over."""
