"""A daemon without free file descriptors reports the error, and clients can continue without the feature."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from footprint import open_files
from small_pool import SMALL_POOL
from waiting import until

from kvservice.client import KVClient, Session
from kvservice.client.threads import finish
from kvservice.client.transports.lane import open_lane
from kvservice.errors import ResourceExhaustedError
from kvservice.launch import Daemon
from kvservice.server.descriptors import Spare, needed

# The number of descriptors that suffices for everything a session uses at a time.
ENOUGH = 8
WANTED: dict[str, Callable[[Session], Any]] = {
    "region": lambda kv: kv.create_region(4096),
    "pool": lambda kv: kv.map_pool(),
    "lane": lambda kv: finish(open_lane(kv._core.context)),
}


@contextmanager
def descriptors_left(pid: int, count: int) -> Iterator[None]:
    """Set the limit of the process so that `count` descriptor numbers are free."""
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in range(1 << 20) if number not in used)
    limit = next(number for index, number in enumerate(free) if index == count)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_every_call_is_done_or_refused_by_name() -> None:
    with (
        Daemon(**SMALL_POOL) as daemon,
        KVClient(daemon.address, transport="inline") as client,
        KVClient(daemon.address) as auto,
    ):
        pid = daemon.process.pid
        files = open_files(pid)
        done = set()
        for count in range(ENOUGH + 1):
            with descriptors_left(pid, count):
                with client.session() as kv:
                    for name, call in WANTED.items():
                        with contextlib.suppress(ResourceExhaustedError):
                            call(kv)
                            done.add((count, name))
                with auto.session() as kv:
                    assert count or kv.transport == "inline"
                    assert kv.describe() == []
        assert {name for count, name in done if count == ENOUGH} == WANTED.keys()
        assert not {name for count, name in done if count == 0}
        assert "ERROR" not in daemon.log.read_text()
        until(lambda: open_files(pid) <= files)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ResourceExhaustedError, match="Too many open files"), needed():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with pytest.raises(FileNotFoundError), needed():
        os.open("/nowhere", os.O_RDONLY)


def test_what_was_lent_is_kept_again() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    spare = Spare()
    before = count()
    with spare.lent():
        assert count() == before - 1
    assert count() == before
    spare.close()
    assert count() == before - 1
