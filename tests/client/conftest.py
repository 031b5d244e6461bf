"""Daemons for the tests of the transports."""

from small_daemons import open_daemon

__all__ = ["open_daemon"]
