"""Daemons for the tests of the transports and of the store."""

from small_daemons import open_daemon
from store_daemons import store_daemon

__all__ = ["open_daemon", "store_daemon"]
