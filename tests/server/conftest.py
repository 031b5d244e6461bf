"""Fixtures for raw RPCs without the client library, and for a daemon that authenticates its callers."""

from raw_wire import raw, raw_session, wire
from secure_daemon import encrypted

__all__ = ["encrypted", "raw", "raw_session", "wire"]
