"""A daemon without free file descriptors reports the error, and clients can continue without the feature."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from footprint import open_files
from small_pool import SMALL_POOL
from waiting import until

from kvservice.client import KVClient, Session
from kvservice.errors import ResourceExhaustedError
from kvservice.launch import Daemon

# The number of descriptors that suffices for everything a session uses at a time.
ENOUGH = 8
WANTED: dict[str, Callable[[Session], Any]] = {
    "region": lambda kv: kv.create_region(4096),
    "pool": lambda kv: kv.map_pool(),
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
        KVClient(daemon.address, transport="lane") as by_lane,
        KVClient(daemon.address) as auto,
    ):
        pid = daemon.process.pid
        files = open_files(pid)
        done = set()
        # Twice without any, because the daemon lends its spare descriptor and takes it back.
        for count in (0, *range(ENOUGH + 1)):
            with descriptors_left(pid, count):
                with client.session() as kv:
                    for name, call in WANTED.items():
                        with contextlib.suppress(ResourceExhaustedError):
                            call(kv)
                            done.add((count, name))
                with contextlib.suppress(ResourceExhaustedError), by_lane.session() as kv:
                    assert kv.transport == "lane"
                    done.add((count, "lane"))
                with auto.session() as kv:
                    assert count or kv.transport == "inline"
                    assert kv.describe() == []
        assert {name for count, name in done if count == ENOUGH} == {*WANTED, "lane"}
        assert not {name for count, name in done if count == 0}
        assert "ERROR" not in daemon.log.read_text()
        until(lambda: open_files(pid) <= files)
        assert open_files(pid)[os.devnull] == files[os.devnull]
