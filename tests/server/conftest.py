"""The contract's wire, without the client, and a daemon that asks who calls."""

from raw_wire import raw, raw_session, wire
from secure_daemon import encrypted

__all__ = ["encrypted", "raw", "raw_session", "wire"]
