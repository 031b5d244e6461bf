"""The contract's wire, without the client."""

from raw_wire import raw, raw_session, wire

__all__ = ["raw", "raw_session", "wire"]
