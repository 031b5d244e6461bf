"""Daemons that the transports are tried on."""

from small_daemons import open_daemon

__all__ = ["open_daemon"]
