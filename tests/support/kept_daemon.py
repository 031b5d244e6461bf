"""A daemon with a keeper, whose process a test ends."""

from __future__ import annotations

import os
import signal

from waiting import until

from kvservice.health import check
from kvservice.launch import Daemon, StartError


def pid_of(daemon: Daemon) -> int | None:
    """Return the id of the daemon's process, or None if the keeper is about to start it."""
    try:
        return daemon.daemon_pid()
    except StartError:
        return None


def next_process(daemon: Daemon, number: signal.Signals) -> None:
    """Send the daemon's process a signal that ends it, and wait until the next one serves."""
    before = daemon.daemon_pid()
    os.kill(before, number)
    until(lambda: pid_of(daemon) not in (None, before))
    until(lambda: check(daemon.address, timeout_s=0.5))
