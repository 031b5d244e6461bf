"""The memory of kept values is short: operations are refused before they change anything, and give memory back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
from constants import set_constants
from daemon_lives import Life, finish
from kept_files import HeldFiles, without_memory

from kvservice.errors import QuotaExceededError, ResourceExhaustedError
from kvservice.v1 import blocks_pb2

KEYS = [blocks_pb2.ExtraKey(position=0, key=bytes([number % 256]) * 256) for number in range(1024)]


@pytest.fixture
def life() -> Iterator[Life]:
    life = Life(HeldFiles())
    yield life
    life.kill()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def allocate(life: Life, session: Any, *ids: int, keys: Any = KEYS) -> None:
    sequences = [blocks_pb2.SequenceAllocation(sequence_id=one, token_ids=[one], extra_keys=keys) for one in ids]
    await life.call(session, "allocate", blocks_pb2.AllocateRequest(sequences=sequences))


async def fork(life: Life, session: Any, parent: int, *children: int) -> None:
    await life.call(session, "fork", blocks_pb2.ForkRequest(parent_ids=[parent] * len(children), child_ids=children))


def fill(life: Life) -> Any:
    """Use up the room of the table. Returns the values that use it."""
    section = life.core.kept.table.section(99)
    for size in (4096, 0):
        with pytest.raises(ResourceExhaustedError):
            add(section, size)
    return section


def add(section: Any, size: int) -> None:
    for number in range(1 << 20):
        section[len(section)] = number.to_bytes(max(size, 4), "little")


@pytest.mark.parametrize("method", ["allocate", "fork", "rearrange"])
def test_what_finds_no_room_for_extra_keys_changes_nothing(
    life: Life, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def rearrange(session: Any) -> None:
        life.manager.rearrange(session.namespace, [2], [1])

    operations: dict[str, Callable[[Any], Awaitable[None]]] = {
        "allocate": lambda session: allocate(life, session, 3, 4, keys=KEYS[:1]),
        "fork": lambda session: fork(life, session, 1, 3, 4),
        "rearrange": rearrange,
    }

    async def scenario() -> None:
        session = life.open()
        await allocate(life, session, 1)
        await allocate(life, session, 2, keys=[])
        before, free = life.manager.stats(), list(life.manager.sequences.free_rows)
        with without_memory(monkeypatch):
            fill(life)
            with pytest.raises(ResourceExhaustedError):
                await operations[method](session)
            assert (life.manager.stats(), life.manager.sequences.free_rows) == (before, free)
            assert list(session.namespace.rows) == [1, 2]
            life.manager.check_integrity()
            await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
            finish(life.sessions.close_in_slices(session))
            life.manager.check_integrity()
        assert life.manager.stats().sequences == 0

    run(scenario())


def test_forks_keep_the_keys_of_their_parent_once(life: Life) -> None:
    async def scenario() -> None:
        session = life.open()
        await allocate(life, session, 1)
        await fork(life, session, 1, *range(2, 40))
        kept = life.core.kept.table.section(3)
        assert len(set(map(id, kept.values()))) == 1
        assert len(kept) == 39

    run(scenario())


def test_a_session_has_its_share_of_the_memory_for_extra_keys(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.blocks", MAX_SESSION_KEY_BYTES=1 << 20)

    async def scenario() -> None:
        session, other = life.open(), life.open()
        await allocate(life, session, 1)
        await fork(life, session, 1, 2, 3)
        with pytest.raises(QuotaExceededError) as caught:
            await fork(life, session, 1, 4)
        assert caught.value.metadata["limit"] == "extra_keys"
        with pytest.raises(QuotaExceededError):
            await allocate(life, session, 4)
        life.manager.rearrange(session.namespace, [2, 3], [1, 1])
        await allocate(life, other, 1)
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        await fork(life, session, 2, 4)
        life.manager.check_integrity()

    run(scenario())


def test_all_sessions_have_so_many_bytes_of_extra_keys(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.blocks", MAX_KEY_BYTES=1 << 20)

    async def scenario() -> None:
        session, other = life.open(), life.open()
        await allocate(life, session, 1, 2, 3)
        with pytest.raises(ResourceExhaustedError):
            await allocate(life, other, 1)
        await allocate(life, other, 1, keys=[])
        finish(life.sessions.close_in_slices(session))
        await allocate(life, other, 2)

    run(scenario())
