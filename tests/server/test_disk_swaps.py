"""Sequences of open sessions that are swapped out to the disk, and come back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from daemon_lives import Life, end_stream
from each_row import each_row
from kept_files import HeldFiles, at_every_line
from sleeping import FEW, FOLDERS, detach, found, inline_transfers, random_session, resume, settle, swap_in, swap_out

from kvservice.errors import (
    DuplicateSequenceError,
    InternalError,
    InvalidArgumentError,
    OutOfBlocksError,
    QuotaExceededError,
    ResourceExhaustedError,
    SavedSessionsOffError,
    SequenceSwappedError,
    SessionNotRestoredError,
    SessionTakenError,
    UnknownSequenceError,
)
from kvservice.v1 import blocks_pb2, session_pb2

Start = Callable[..., Life]
TOKENS = list(range(10))
DISK = blocks_pb2.SWAP_TIER_DISK


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def start(disk: Path) -> Iterator[Start]:
    """Return a function that starts the next process of the daemon. `held` is what it takes over, if anything."""
    lives: list[Life] = []

    def start(held: HeldFiles | None = None, **options: Any) -> Life:
        if lives:
            lives[-1].kill()
        lives.append(Life(held or HeldFiles(), **{"disk": str(disk)} | options))
        return lives[-1]

    yield start
    if lives:
        lives[-1].kill()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def describe(life: Life, session: Any, *ids: int, first: int = 0) -> Any:
    return await life.call(session, "describe", blocks_pb2.DescribeRequest(sequence_ids=ids, first=first))


def swapped_files(disk: Path) -> list[Path]:
    return sorted((disk / "sessions").glob("*.swapped"))


def test_random_sequences_come_back_byte_by_byte(start: Start, tmp_path: Path) -> None:
    async def scenario(seed: int) -> None:
        disk = tmp_path / f"disk{seed}"
        life = start(disk=str(disk))
        session = life.open()
        await random_session(life, session, seed)
        expected = {name: one._replace(swapped=False) for name, one in (await found(life, session)).items()}
        ids = list(expected)
        half = len(ids) // 2
        for part in (ids[:half], ids[half:]):
            if part:
                await swap_out(life, session, *part)
        assert (life.manager.stats().active_blocks, life.manager.stats().used_swap_blocks) == (0, 0)
        assert not session.namespace.rows
        life.manager.check_integrity()
        for part in (ids[::2], ids[1::2]):
            if part:
                await swap_in(life, session, *part)
        assert await found(life, session) == expected
        await settle()
        assert swapped_files(disk) == []
        life.manager.check_integrity()

    with each_row() as row:
        for seed in range(8):
            with row(seed):
                run(scenario(seed))


def test_sequences_on_the_disk_are_known_but_not_used(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await life.compute(session, 2, [50, 51])
        await life.allocate(session, 3, [60])
        assert await swap_out(life, session, 1, 3) == 4
        assert await swap_out(life, session, 1, 3) == 0
        one = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[1])
        for method, request, error in (
            ("append", blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[1]), SequenceSwappedError),
            ("truncate", blocks_pb2.TruncateRequest(sequence_ids=[1], lengths=[0]), SequenceSwappedError),
            ("fork", blocks_pb2.ForkRequest(parent_ids=[1], child_ids=[9]), SequenceSwappedError),
            ("fork", blocks_pb2.ForkRequest(parent_ids=[2], child_ids=[1]), DuplicateSequenceError),
            ("swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[1]), SequenceSwappedError),
            ("swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[1, 2], tier=DISK), SequenceSwappedError),
            ("swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[2], tier=cast(Any, 7)), InvalidArgumentError),
            ("swap_in", blocks_pb2.SwapInRequest(sequence_ids=[1, 2]), InvalidArgumentError),
            ("swap_in", blocks_pb2.SwapInRequest(sequence_ids=[1, 1]), InvalidArgumentError),
            ("can_swap_in", blocks_pb2.CanSwapInRequest(sequence_ids=[1, 2]), InvalidArgumentError),
            ("allocate", blocks_pb2.AllocateRequest(sequences=[one]), DuplicateSequenceError),
            ("describe", blocks_pb2.DescribeRequest(sequence_ids=[1, 77]), UnknownSequenceError),
        ):
            with pytest.raises(error):
                await life.call(session, method, request)
        everything = await describe(life, session)
        assert [(d.sequence_id, d.length, d.num_computed_tokens, d.on_disk) for d in everything.sequences] == [
            (2, 2, 2, False), (1, 10, 10, True), (3, 1, 0, True),
        ]  # fmt: skip
        assert everything.num_sequences == 3
        assert [d.sequence_id for d in (await describe(life, session, 3, 2, 1)).sequences] == [3, 2, 1]
        assert [d.sequence_id for d in (await describe(life, session, first=2)).sequences] == [3]
        assert not (await describe(life, session, first=3)).sequences
        life.manager.check_integrity()

    run(scenario())


def test_freed_sequences_and_closed_sessions_leave_no_files(start: Start, disk: Path) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        for name in range(4):
            await life.compute(session, name, [name, 1, 2, 3, 4])
        await swap_out(life, session, 0, 1)
        await swap_out(life, session, 2)
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[0, 3, 2]))
        await settle()
        assert len(swapped_files(disk)) == 1
        with pytest.raises(UnknownSequenceError):
            await swap_in(life, session, 2)
        assert [one.sequence_id for one in (await describe(life, session)).sequences] == [1]
        for _ in life.sessions.close_in_slices(session):
            pass
        await settle()
        assert swapped_files(disk) == []

    run(scenario())


def test_no_room_or_a_damaged_file_leaves_them_on_the_disk(start: Start, disk: Path) -> None:
    async def scenario() -> None:
        life = start()
        session, other = life.open(), life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await swap_out(life, session, 1)
        await life.allocate(other, 1, list(range(100, 100 + 62 * 4)))
        response = await life.call(session, "can_swap_in", blocks_pb2.CanSwapInRequest(sequence_ids=[1]))
        assert response.status == blocks_pb2.ALLOC_STATUS_LATER
        with pytest.raises(OutOfBlocksError):
            await swap_in(life, session, 1)
        await life.call(other, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        response = await life.call(session, "can_swap_in", blocks_pb2.CanSwapInRequest(sequence_ids=[1]))
        assert response.status == blocks_pb2.ALLOC_STATUS_OK
        (path,) = swapped_files(disk)
        whole = path.read_bytes()
        path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
        await life.call(other, "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        for _ in range(3):  # more often than there are hidden namespaces
            with pytest.raises(SessionNotRestoredError, match="damaged"):
                await swap_in(life, session, 1)
        life.manager.check_integrity()
        path.write_bytes(whole)
        assert await swap_in(life, session, 1) == 3
        assert np.array_equal(await life.read(session, 1, 10), kv)
        await life.compute(session, 2, [77] * 5)
        await swap_out(life, session, 2)
        for path in swapped_files(disk):
            path.unlink()
        with pytest.raises(SessionNotRestoredError, match="missing"):
            await swap_in(life, session, 2)
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[1, 2]))
        assert life.manager.stats().sequences == 0

    run(scenario())


def test_a_swap_out_that_fails_changes_nothing(start: Start) -> None:
    async def scenario(options: dict[str, Any], error: type[Exception]) -> None:
        life = start(**options)
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        with pytest.raises(error):
            await swap_out(life, session, 1)
        with pytest.raises((UnknownSequenceError, SavedSessionsOffError)):
            await swap_out(life, session, 9)
        assert np.array_equal(await life.read(session, 1, 10), kv)
        life.manager.check_integrity()

    run(scenario({"disk": ""}, SavedSessionsOffError))
    run(scenario({"disk_sessions_gib": 8192 / 2**30}, QuotaExceededError))


def test_a_saved_session_keeps_its_sequences_on_the_disk(start: Start, disk: Path) -> None:
    """After a reboot they are swapped as before. A saved state keeps its files until it is replaced."""

    async def scenario() -> None:
        life = start()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await life.compute(session, 2, [50, 51, 52, 53, 54])
        await swap_out(life, session, 1)
        assert (await detach(life, session)).num_sequences == 2
        await life.core.saved.expire()
        life = start()
        await life.core.saved.expire()
        again = await resume(life, session.token)
        everything = await describe(life, again)
        assert [(one.sequence_id, one.on_disk) for one in everything.sequences] == [(2, False), (1, True)]
        await swap_in(life, again, 1)
        assert np.array_equal(await life.read(again, 1, 10), kv)
        await settle()
        assert len(swapped_files(disk)) == 1, "the saved state needs it"
        life = start()
        third = await resume(life, session.token)
        await swap_in(life, third, 1)
        assert np.array_equal(await life.read(third, 1, 10), kv)
        await life.call(third, "detach", session_pb2.DetachRequest(durable=True))
        assert swapped_files(disk) == []
        life.sessions.detach(third, end_stream)
        life = start()
        assert sorted((await resume(life, session.token)).namespace.rows) == [1, 2]

    run(scenario())


def test_a_loop_of_swaps_leaves_no_files_beside_the_saved_state(start: Start, disk: Path) -> None:
    """The saved state needs one file. Each cycle after it writes another one, and removes it."""

    async def cycle(life: Life, session: Any) -> None:
        await swap_out(life, session, 1)
        assert len(swapped_files(disk)) == 2
        await swap_in(life, session, 1)
        await settle()

    async def scenario() -> None:
        life = start()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await swap_out(life, session, 1)
        await detach(life, session)
        needed = swapped_files(disk)
        again = await resume(life, session.token)
        await swap_in(life, again, 1)
        await settle()
        for _ in range(3):
            await cycle(life, again)
            assert swapped_files(disk) == needed
        life = start()
        third = await resume(life, session.token)
        assert set(third.namespace.on_disk) == {1}
        await swap_in(life, third, 1)
        await settle()
        for _ in range(3):
            await cycle(life, third)
            assert swapped_files(disk) == needed
        assert np.array_equal(await life.read(third, 1, 10), kv)

    run(scenario())


def test_a_process_that_takes_over_knows_what_the_saved_state_needs(disk: Path) -> None:
    async def scenario() -> None:
        held = HeldFiles()
        life = Life(held, disk=str(disk), **FEW)
        session = life.open(detachable=True)
        await life.compute(session, 1, TOKENS)
        await swap_out(life, session, 1)
        await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        needed = swapped_files(disk)
        life.sessions.detach(session, end_stream)
        again = await resume(life, session.token)
        await swap_in(life, again, 1)
        await settle()
        life.kill()
        life = Life(HeldFiles.of(held.content()), disk=str(disk), **FEW)
        third = life.attach(session.token)
        for _ in range(2):
            await swap_out(life, third, 1)
            assert len(swapped_files(disk)) == 2
            await swap_in(life, third, 1)
            await settle()
            assert swapped_files(disk) == needed
        (saved,) = (disk / "sessions").glob("*.session")
        saved.write_bytes(saved.read_bytes()[:8192])
        await swap_out(life, third, 1)
        await swap_in(life, third, 1)
        await settle()
        assert swapped_files(disk) == needed
        life.kill()

    run(scenario())


def test_what_was_swapped_after_the_saved_state_goes_when_that_is_restored(start: Start, disk: Path) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await life.compute(session, 2, [50, 51])
        await swap_out(life, session, 1)
        await detach(life, session)
        needed = swapped_files(disk)
        again = await resume(life, session.token)
        await swap_out(life, again, 2)
        assert len(swapped_files(disk)) == 2
        life = start()
        third = await resume(life, session.token)
        await settle()
        assert swapped_files(disk) == needed
        assert (set(third.namespace.rows), set(third.namespace.on_disk)) == ({2}, {1})

    run(scenario())


def test_a_saved_state_is_whole_at_every_line_of_what_follows(
    start: Start, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that fails while a restored session swaps, and is saved again, has what its last saved state names."""
    inline_transfers(monkeypatch)

    async def scenario() -> None:
        life = start(**FEW)
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await swap_out(life, session, 1)
        await detach(life, session)
        again = await resume(life, session.token)
        copies: dict[tuple[str, ...], Path] = {}

        def note() -> None:
            names = tuple(sorted(path.name for path in (disk / "sessions").iterdir()))
            if names not in copies:
                copies[names] = tmp_path / f"copy{len(copies)}"
                shutil.copytree(disk, copies[names])

        with at_every_line(FOLDERS, note):
            await swap_in(life, again, 1)
            await settle()
            await swap_out(life, again, 1)
            await life.call(again, "detach", session_pb2.DetachRequest(durable=True))
            await settle()
        note()
        assert len(copies) > 4
        for copy in copies.values():
            life = start(disk=str(copy), **FEW)
            last = await resume(life, session.token)
            if last.namespace.on_disk:
                await swap_in(life, last, 1)
            assert np.array_equal(await life.read(last, 1, 10), kv)

    run(scenario())


def test_files_of_lost_sessions_are_removed(start: Start, disk: Path) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await swap_out(life, session, 1)
        await life.core.saved.expire()
        assert len(swapped_files(disk)) == 1
        life = start()
        await life.core.saved.expire()
        assert swapped_files(disk) == []

    run(scenario())


def test_a_repeated_request_is_answered_from_memory(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        assert await swap_out(life, session, 1, request_id=5) == 3
        assert await swap_out(life, session, 1, request_id=5) == 3
        await life.call(session, "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        assert await swap_in(life, session, 1, request_id=6) == 3
        assert await swap_in(life, session, 1, request_id=6) == 3

    run(scenario())


@pytest.mark.parametrize("direction", ["out", "in", "free"])
def test_a_daemon_that_is_killed_at_any_line_has_them_once(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """The next process finds them in memory or on the disk, byte by byte, and the retried request has its effect."""
    inline_transfers(monkeypatch)

    async def scenario() -> None:
        held = HeldFiles()
        life = Life(held, disk=str(disk), **FEW)
        session = life.open(detachable=True)
        await random_session(life, session, 6)
        expected = {name: one._replace(swapped=False) for name, one in (await found(life, session)).items()}
        ids = [name for name, one in expected.items() if one.num_computed][:3]
        if direction != "out":
            await swap_out(life, session, *ids)
        states: list[tuple[Any, Path]] = []
        seen: set[Any] = set()

        def note() -> None:
            content = held.content()
            names = tuple(sorted((path.name, path.stat().st_size) for path in (disk / "sessions").iterdir()))
            if (key := (hash(content), names)) not in seen:
                seen.add(key)
                copy = tmp_path / f"copy{len(seen)}"
                shutil.copytree(disk, copy)
                states.append((content, copy))

        with at_every_line((*FOLDERS, "blocks/freeing.py"), note):
            if direction == "out":
                await swap_out(life, session, *ids, request_id=9)
            elif direction == "in":
                await swap_in(life, session, *ids, request_id=9)
            else:
                await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=ids, request_id=9))
            await settle()
        note()
        life.kill()
        assert len(states) > 5
        chosen = states if len(states) < 60 else states[:: len(states) // 50] + states[-12:]
        for content, copy in chosen:
            kept = HeldFiles.of(content)
            after = Life(kept, disk=str(copy), **FEW)
            assert after.core.report.outcome == "taken over"
            again = after.attach(session.token)
            known = set(again.namespace.rows) | set(again.namespace.on_disk)
            assert not set(again.namespace.rows) & set(again.namespace.on_disk)
            assert set(expected) - known <= (set(ids) if direction == "free" else set())
            if direction == "free":
                await after.call(again, "free", blocks_pb2.FreeRequest(sequence_ids=ids, request_id=9))
                known -= set(ids)
            if direction == "out":
                await swap_out(after, again, *ids, request_id=9)
                assert set(again.namespace.on_disk) == set(ids)
            if direction == "in":
                await swap_in(after, again, *ids, request_id=9)
                assert not again.namespace.on_disk
            if again.namespace.on_disk:
                await swap_in(after, again, *again.namespace.on_disk)
            now = {name: one._replace(swapped=False) for name, one in (await found(after, again)).items()}
            assert now == {name: one for name, one in expected.items() if name in known}
            after.manager.check_integrity()
            after.kill()
            kept.close()

    run(scenario())


def test_sequences_on_the_disk_count_as_those_with_a_row(start: Start) -> None:
    async def scenario() -> None:
        life = start(max_sequences=4)
        session = life.open()
        for name in (1, 2, 3):
            await life.compute(session, name, [name])
        await swap_out(life, session, 1, 2, 3)
        await life.allocate(session, 4, [4])
        with pytest.raises(QuotaExceededError):
            await life.allocate(session, 5, [5])
        with pytest.raises(QuotaExceededError):
            await life.call(session, "fork", blocks_pb2.ForkRequest(parent_ids=[4], child_ids=[5]))
        can = await life.call(session, "can_swap_in", blocks_pb2.CanSwapInRequest(sequence_ids=[1, 2, 3]))
        assert can.status == blocks_pb2.ALLOC_STATUS_OK
        assert await swap_in(life, session, 1, 2) == 2
        life.manager.check_integrity()
        with pytest.raises(QuotaExceededError):
            await life.allocate(session, 5, [5])
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[3]))
        await life.allocate(session, 5, [5])
        life.manager.check_integrity()

    run(scenario())


def test_sequences_on_the_disk_count_after_a_restart(start: Start) -> None:
    async def scenario() -> None:
        held = HeldFiles()
        life = start(held, max_sequences=2)
        session = life.open()
        await life.compute(session, 1, [1])
        await life.compute(session, 2, [2])
        await swap_out(life, session, 1, 2)
        life = start(held, max_sequences=2)
        life.manager.check_integrity()
        other = life.open()
        with pytest.raises(QuotaExceededError):
            await life.allocate(other, 1, [1])
        await asyncio.sleep(0)

    run(scenario())


def test_a_saved_session_needs_places_for_its_sequences_on_the_disk(start: Start) -> None:
    async def scenario() -> None:
        life = start(max_sequences=2)
        session = life.open(detachable=True, detach_ttl_s=100.0)
        await life.compute(session, 1, [1])
        await life.compute(session, 2, [2])
        await swap_out(life, session, 1, 2)
        await detach(life, session)
        await settle()
        other = life.open()
        await life.allocate(other, 1, [1])
        with pytest.raises(QuotaExceededError):
            await resume(life, session.token)
        life.manager.check_integrity()
        await life.call(other, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        again = await resume(life, session.token)
        life.manager.check_integrity()
        assert await swap_in(life, again, 1, 2) == 2

    run(scenario())


def test_sequences_that_the_record_cannot_name_stay_where_they_are(
    start: Start, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, [1])
        await life.compute(session, 2, [2])
        await swap_out(life, session, 1)
        with monkeypatch.context() as small:
            small.setattr("kvservice.server.sessions.saved.MAX_VALUE_BYTES", 600)
            with pytest.raises(ResourceExhaustedError, match="record"):
                await swap_out(life, session, 2)
        assert list(session.namespace.rows) == [2]
        assert len(swapped_files(disk)) == 1
        await swap_out(life, session, 2)
        assert list(session.namespace.on_disk) == [1, 2]

    run(scenario())


def test_a_swap_out_that_cannot_be_recorded_changes_nothing(
    start: Start, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, [1])
        with monkeypatch.context() as short:
            short.setattr(life.core.saved.swaps, "_save_record", no_memory)
            with pytest.raises(InternalError):
                await swap_out(life, session, 1)
        await settle()
        assert (list(session.namespace.rows), session.on_disk, swapped_files(disk)) == ([1], {}, [])
        await swap_out(life, session, 1)
        assert await swap_in(life, session, 1) == 1

    run(scenario())


def no_memory(*_: Any) -> None:
    raise MemoryError


def test_a_session_that_is_taken_over_when_its_blocks_are_read_is_not_changed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await swap_out(life, session, 1)
        swaps = life.core.saved.swaps
        restore = swaps._restore

        async def then_taken(*arguments: Any) -> Any:
            read = await restore(*arguments)
            life.attach(session.token, 2)
            return read

        with monkeypatch.context() as taken:
            taken.setattr(swaps, "_restore", then_taken)
            with pytest.raises(SessionTakenError):
                await swap_in(life, session, 1)
        await settle()
        assert (dict(session.namespace.rows), list(session.namespace.on_disk)) == ({}, [1])
        life.manager.check_integrity()
        await swap_in(life, session, 1)
        assert list(session.namespace.rows) == [1]

    run(scenario())
