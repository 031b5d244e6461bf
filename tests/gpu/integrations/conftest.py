"""Daemons with a small store for the tests of copies."""

from store_daemons import store_daemon

__all__ = ["store_daemon"]
