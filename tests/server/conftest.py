"""Fixtures for raw RPCs without the client library, a daemon that authenticates its callers, and daemons without a
server."""

from manual_clock import clock
from raw_wire import raw, raw_session, wire
from saved_rig import reboot, wall
from secure_daemon import encrypted
from spill_rig import start_spilling

__all__ = ["clock", "encrypted", "raw", "raw_session", "reboot", "start_spilling", "wall", "wire"]
