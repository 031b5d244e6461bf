"""A process that waits to take over from a running one: what it checks, and that it changes nothing."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_lives import Life
from each_row import each_row
from kept_files import HeldFiles, content_of
from manual_clock import ManualClock
from small_pool import SMALL_POOL

from kvservice.config import ServeConfig
from kvservice.server.daemon import StandbyEndedError, stand_by

NEWEST = {"newest": 99}


class FakeStandby:
    """The keeper's answers."""

    def __init__(self, *, gives_up: bool = False) -> None:
        self.refusals: list[str] = []
        self._gives_up = gives_up

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)

    def wait_for_go(self) -> dict[str, int]:
        if self._gives_up:
            raise EOFError("the keeper has given the upgrade up")
        return NEWEST


@pytest.fixture
def held() -> Iterator[HeldFiles]:
    """Return the descriptors that the keeper holds of a running process."""
    held, clock = HeldFiles(), ManualClock()

    async def begin() -> Life:
        return Life(held, clock)

    life = asyncio.run(begin())
    yield held
    life.kill()
    clock.close()
    held.close()


def wait(held: HeldFiles, standby: FakeStandby, **options: Any) -> dict[str, int]:
    """Stand by with duplicates of the descriptors, which must be closed afterwards."""
    taken = {name: os.dup(fd) for name, fd in held.held.items()}
    try:
        standing: Any = standby
        return stand_by(ServeConfig(**SMALL_POOL | options), standing, taken)
    finally:
        for fd in taken.values():
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


def test_it_waits_and_changes_nothing(held: HeldFiles) -> None:
    before = {name: content_of(fd) for name, fd in held.held.items()}
    standby = FakeStandby()
    assert wait(held, standby) == NEWEST
    assert standby.refusals == []
    assert {name: content_of(fd) for name, fd in held.held.items()} == before


def test_another_configuration_and_one_that_cannot_start_are_refused(held: HeldFiles, tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"max_sequences": 65}, "max_sequences was 64, is 65"),
        ({"device": "cuda:7"}, "device was cpu, is cuda:7"),
        ({"unix_socket": str(tmp_path / "nowhere" / "s.sock")}, "unix_socket.*is not a directory"),
        ({"tcp_address": "0.0.0.0:1"}, "tcp_address"),
        ({"auth_tokens": "/nowhere"}, "auth_tokens"),
    ]
    with each_row() as row:
        for options, reason in rows:
            with row(options):
                standby = FakeStandby()
                with pytest.raises(StandbyEndedError, match=reason):
                    wait(held, standby, **options)
                (refusal,) = standby.refusals
                assert re.search(reason, refusal)


def test_an_address_is_free_for_the_next_process_if_the_running_one_has_it(held: HeldFiles) -> None:
    """The keeper has its sockets by these names. One that another process has is refused."""
    with each_row() as row:
        for name, field in (("kvservice.http", "http_address"), ("kvservice.grpc", "tcp_address")):
            with row(field), socket.create_server(("127.0.0.1", 0)) as listening:
                address = f"127.0.0.1:{listening.getsockname()[1]}"
                with pytest.raises(StandbyEndedError, match=rf"{field}.*{address}"):
                    wait(held, FakeStandby(), **{field: address})
                held.held[name] = os.dup(listening.fileno())
                assert wait(held, FakeStandby(), **{field: address}) == NEWEST


def test_without_state_there_is_nothing_to_wait_for() -> None:
    standby = FakeStandby()
    with pytest.raises(StandbyEndedError, match="there is none"):
        wait(HeldFiles(), standby)


def test_the_keeper_gives_up(held: HeldFiles) -> None:
    standby = FakeStandby(gives_up=True)
    with pytest.raises(StandbyEndedError, match="given the upgrade up"):
        wait(held, standby)
    assert standby.refusals == []
