"""One upgrade: its standby process, its phase, and the reports to the client that asked for it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

# A function that sends an answer, a JSON object, to a client of the control socket.
Report: TypeAlias = Callable[[dict[str, Any]], None]

# The limit on the time that the new process needs to import its modules and to check the state.
PREPARE_S = 120.0


class UpgradePhase(Enum):
    PREPARING = "the new process starts"
    DRAINING = "the old process drains"
    TAKING_OVER = "the new process takes over"


@dataclass(frozen=True)
class Upgraded:
    """The result of an upgrade. `message` is for a person. `pause_s` is the time from the beginning of the drain until
    the new process served."""

    ok: bool
    message: str
    pause_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"event": "result", "ok": self.ok, "message": self.message, "pause_s": self.pause_s}


class Upgrade:
    def __init__(self, pid: int, channel: socket.socket, old_version: str, now: float, report: Report) -> None:
        """`pid` is the standby process and `channel` leads to it. `now` is the time of a monotonic clock in seconds."""
        self.pid, self.channel, self.old_version = pid, channel, old_version
        self.phase = UpgradePhase.PREPARING
        self.deadline: float | None = now + PREPARE_S
        self.refusal = ""
        # The end of the old process, if it was not in order.
        self.disorder = ""
        self._report = report
        self._drained_from: float | None = None
        self._progress()

    def drain(self, now: float, timeout_s: float) -> None:
        """Note that the old process has been asked to hand over."""
        self._drained_from, self.deadline = now, now + timeout_s
        self._enter(UpgradePhase.DRAINING)

    def take_over(self) -> None:
        """Note that the old process has ended, and that the new one knows."""
        self.deadline = None
        self.channel.close()
        self._enter(UpgradePhase.TAKING_OVER)

    def served(self, now: float, version: str) -> Upgraded:
        """The new process serves. Returns the result, which has been reported."""
        assert self._drained_from is not None
        pause_s = now - self._drained_from
        message = f"upgraded {self.old_version} -> {version}, paused {pause_s:.2f} s"
        if self.disorder:
            message += f"; {self.disorder}, so its state was taken over as after a crash"
        return self._end(Upgraded(True, message, round(pause_s, 3)))

    def failed(self, reason: str) -> Upgraded:
        """The upgrade has come to nothing. Returns the result, which has been reported."""
        self.channel.close()
        return self._end(Upgraded(False, self.refusal or reason))

    def _enter(self, phase: UpgradePhase) -> None:
        self.phase = phase
        self._progress()

    def _progress(self) -> None:
        self._report({"event": "progress", "message": self.phase.value})

    def _end(self, result: Upgraded) -> Upgraded:
        self._report(result.to_json())
        return result
