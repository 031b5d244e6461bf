"""The total memory shared with clients is bounded, and memory counts until the kernel has freed it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import manual_loop
import pytest
from daemon_lives import Life
from kept_files import HeldFiles
from manual_clock import ManualClock
from open_files import num_open_files
from waiting import until

from kvservice.errors import QuotaExceededError, ResourceExhaustedError
from kvservice.v1 import regions_pb2

MIB = 1 << 20
# The budget looks once a second whether clients keep memory, and keeps so many descriptors for that.
SWEEP_S, MAX_KEPT = 1.0, 1024


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    """A daemon that shares at most 2 MiB."""
    held = HeldFiles()
    opened = Life(held, clock, max_shared_mib=2, max_region_mib=1 << 20)
    yield opened
    opened.kill()
    held.close()


@pytest.fixture
def budget(life: Life) -> Any:
    return life.open().shared.budget


def test_what_is_taken_is_counted_before_it_is_made(life: Life, budget: Any) -> None:
    async def scenario() -> None:
        session = life.open()

        async def create(name: str, num_bytes: int) -> None:
            request = regions_pb2.CreateRegionRequest(name=name, byte_size=num_bytes)
            await life.call(session, "create_region", request)

        await create("one", MIB)
        assert budget.used_bytes == MIB
        for num_bytes in (MIB + 1, 1 << 39):  # no host has room for the larger one
            with pytest.raises(QuotaExceededError) as caught:
                await create("other", num_bytes)
            assert (caught.value.field, caught.value.metadata["limit"], caught.value.metadata["value"]) == (
                "byte_size", "max_shared_mib", "2"
            )  # fmt: skip
            assert budget.used_bytes == MIB
        request = regions_pb2.UnregisterRegionRequest(name="one")
        await life.call(session, "unregister_region", request)
        while budget.used_bytes:  # a background thread may still unmap it
            await manual_loop.advance(SWEEP_S)

    manual_loop.run(scenario())


def test_memory_is_left_for_the_daemon_itself(budget: Any) -> None:
    """In a container with a memory limit, exceeding it by one byte would kill the daemon."""
    assert budget.reserve_bytes == 64 * MIB
    budget.reserve_bytes = 1 << 60
    with pytest.raises(ResourceExhaustedError, match=os.strerror(errno.ENOMEM)) as caught:
        budget.make("test", MIB, field="byte_size")
    assert caught.value.field == "byte_size"
    assert budget.used_bytes == 0


def test_memory_that_a_client_keeps_counts(budget: Any) -> None:
    async def scenario(read_only: bool) -> None:
        memory = budget.make("test", MIB, read_only=read_only)
        theirs = memory.descriptor()
        memory.close()
        memory.close()
        assert budget.used_bytes == MIB
        with pytest.raises(QuotaExceededError):
            budget.make("test", 2 * MIB)
        os.close(theirs)
        budget.make("test", 2 * MIB).close()  # kept memory is checked when room is needed
        theirs_again = (memory := budget.make("test", MIB)).descriptor()
        memory.close()
        await manual_loop.advance(SWEEP_S)
        assert budget.used_bytes == MIB
        os.close(theirs_again)
        await manual_loop.advance(SWEEP_S)  # and periodically
        assert budget.used_bytes == 0

    before = num_open_files()
    for read_only in (False, True):
        manual_loop.run(scenario(read_only))
    until(lambda: num_open_files() <= before)  # a background thread closes them


def test_an_error_that_is_not_about_descriptors_stays_what_it_is(budget: Any) -> None:
    memory = budget.make("test", MIB)
    whole, memory.sealed = memory.sealed, SimpleNamespace(fd=-1)
    with pytest.raises(FileNotFoundError):
        memory.descriptor()
    memory.sealed = whole
    memory.close()


def test_so_many_pieces_may_be_kept(budget: Any) -> None:
    """Each kept memory object uses a file descriptor."""

    async def scenario() -> None:
        theirs = []
        for _ in range(MAX_KEPT):
            memory = budget.make("test", 1)
            theirs.append(memory.descriptor())
            memory.close()
        with pytest.raises(QuotaExceededError, match="pieces of memory"):
            budget.make("test", 1)
        os.close(theirs.pop())
        budget.make("test", 1).close()
        for descriptor in theirs:
            os.close(descriptor)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 8 * MAX_KEPT), limits[1]))
    try:
        manual_loop.run(scenario())
        budget.sweep()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert budget.used_bytes == 0
