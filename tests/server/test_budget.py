"""The total memory shared with clients is bounded, and memory counts until the kernel has freed it."""

from __future__ import annotations

import asyncio
import os

import pytest
from waiting import until

from kvservice.errors import QuotaExceededError, ResourceExhaustedError
from kvservice.pool import sealed
from kvservice.server import budget as budget_module
from kvservice.server.budget import RESERVE_BYTES, Budget

MIB = 1 << 20


@pytest.fixture
def budget() -> Budget:
    return Budget(2)


def test_what_is_taken_is_counted_before_it_is_made(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = budget.make("test", MIB)
    assert budget.used_bytes == MIB
    monkeypatch.setattr(budget_module, "SealedMemory", lambda *_: pytest.fail("was made"))
    with pytest.raises(QuotaExceededError) as caught:
        budget.make("test", MIB + 1, field="byte_size")
    assert (caught.value.field, caught.value.metadata["limit"], caught.value.metadata["value"]) == (
        "byte_size", "max_shared_mib", "2"
    )  # fmt: skip
    assert budget.used_bytes == MIB
    memory.close()
    memory.close()
    assert budget.used_bytes == 0


def test_memory_is_left_for_the_daemon_itself(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a memory limit, exceeding it by one byte would kill the daemon."""
    monkeypatch.setattr(sealed, "available_bytes", lambda: RESERVE_BYTES + MIB)
    with pytest.raises(ResourceExhaustedError) as caught:
        budget.make("test", MIB + 1, field="byte_size")
    assert caught.value.field == "byte_size"
    assert budget.used_bytes == 0
    budget.make("test", MIB).close()


@pytest.mark.parametrize("read_only", [False, True])
def test_memory_that_a_client_keeps_counts(budget: Budget, monkeypatch: pytest.MonkeyPatch, read_only: bool) -> None:
    monkeypatch.setattr(budget_module, "SWEEP_S", 0.01)

    async def scenario() -> None:
        memory = budget.make("test", MIB, read_only=read_only)
        theirs = memory.descriptor()
        memory.close()
        assert budget.used_bytes == MIB
        with pytest.raises(QuotaExceededError):
            budget.make("test", 2 * MIB)
        os.close(theirs)
        budget.make("test", 2 * MIB).close()  # kept memory is checked when room is needed
        theirs_again = (memory := budget.make("test", MIB)).descriptor()
        memory.close()
        await asyncio.sleep(0.05)
        assert budget.used_bytes == MIB
        os.close(theirs_again)
        while budget.used_bytes:  # and periodically
            await asyncio.sleep(0.01)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(scenario())
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # a background thread closes them


def test_so_many_pieces_may_be_kept(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kept memory object uses a file descriptor."""
    monkeypatch.setattr(budget_module, "MAX_KEPT", 2)

    async def scenario() -> None:
        theirs = []
        for _ in range(2):
            memory = budget.make("test", 4096)
            theirs.append(memory.descriptor())
            memory.close()
        with pytest.raises(QuotaExceededError):
            budget.make("test", 4096)
        os.close(theirs.pop())
        budget.make("test", 4096).close()
        os.close(theirs.pop())

    asyncio.run(scenario())
    budget.sweep()
    assert budget.used_bytes == 0
