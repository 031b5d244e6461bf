"""Fixtures for daemons with saved sessions."""

from manual_clock import clock
from saved_rig import reboot, wall

__all__ = ["clock", "reboot", "wall"]
