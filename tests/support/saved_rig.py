"""Daemons with saved sessions, each of which finds nothing of the one before but its disk."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_lives import Life
from kept_files import HeldFiles
from manual_clock import ManualClock
from sleeping import resume

Reboot = Callable[..., Life]
TOKENS = list(range(10))


class WallClock:
    """Seconds since 1970: those that have passed on the clock of the test, from a time that the test may set."""

    def __init__(self, clock: ManualClock) -> None:
        self.zero = 1e9
        self._clock = clock

    def __call__(self) -> float:
        return self.zero + self._clock.now

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)


@pytest.fixture
def wall(clock: ManualClock) -> WallClock:
    return WallClock(clock)


@pytest.fixture
def reboot(tmp_path: Path, clock: ManualClock, wall: WallClock) -> Iterator[Reboot]:
    """Return a function that starts a daemon after a reboot."""
    lives: list[Life] = []

    def start(**options: Any) -> Life:
        if lives:
            lives[-1].kill()
        options = {"disk": str(tmp_path / "disk"), "max_detach_ttl_s": 1000.0} | options
        lives.append(Life(HeldFiles(), clock, wall=wall, **options))
        return lives[-1]

    yield start
    if lives:
        lives[-1].kill()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "disk" / "sessions").iterdir() if path.name != "lock")


def file_of(token: bytes) -> str:
    """Return the name of a session's file."""
    return hashlib.sha256(b"kvservice session " + token).hexdigest() + ".session"


async def resume_error(life: Life, token: bytes) -> Any:
    with pytest.raises(Exception) as raised:  # noqa: PT011  the test compares it
        await resume(life, token)
    return raised.value
