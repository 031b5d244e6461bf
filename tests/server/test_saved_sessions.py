"""Sessions on the disk: Detach writes them, a client with the token gets them back, in this daemon or a later one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life, caller, end_stream
from kept_files import HeldFiles, at_every_line
from manual_clock import ManualClock
from sleeping import FEW, FOLDERS, detach, found, inline_transfers, random_session, resume, settle, sharing

from kvservice.errors import (
    DiskFailedError,
    DiskFullError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfBlocksError,
    QuotaExceededError,
    SavedSessionsOffError,
    SessionBusyError,
    SessionNotRestoredError,
    SessionTakenError,
    UnknownSessionError,
)
from kvservice.v1 import blocks_pb2, scheduler_pb2, session_pb2

Start = Callable[..., Life]
TOKENS = list(range(10))


class WallClock:
    """Seconds since 1970, which the test advances."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> WallClock:
    return WallClock()


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    clock = ManualClock()
    yield clock
    clock.close()


@pytest.fixture
def start(tmp_path: Path, clock: ManualClock, wall: WallClock) -> Iterator[Start]:
    """Return a function that starts a daemon after a reboot: nothing is left of the one before but its disk."""
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


# ---- what comes back


@pytest.mark.parametrize("seed", range(12))
def test_a_random_session_comes_back_byte_by_byte_after_a_reboot(start: Start, seed: int) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open("engine", tenant="acme")
        await random_session(life, session, seed)
        expected, tables = await found(life, session), sharing(life, session)
        keys = {name: life.manager.state.sequences.extra_keys.get(row) for name, row in session.namespace.rows.items()}
        response = await detach(life, session)
        assert response.num_sequences == len(expected)
        assert not len(life.sessions)
        assert life.manager.stats().sequences == 0
        life.manager.check_integrity()

        life = start()
        again = await resume(life, session.token)
        life.manager.check_integrity()
        assert (again.name, again.tenant, again.wait_s) == ("engine", "acme", 1000.0)
        assert list(again.namespace.rows) == list(expected)
        now = sharing(life, again)
        flat = [(one, other) for a, b in zip(tables, now, strict=True) for one, other in zip(a, b, strict=True)]
        assert len({one for one, _ in flat}) == len(set(flat)), "what was shared is not shared any more"
        assert keys == {
            name: life.manager.state.sequences.extra_keys.get(row) for name, row in again.namespace.rows.items()
        }
        assert await found(life, again) == expected
        life.manager.check_integrity()

    run(scenario())


def test_the_session_goes_on_as_one_that_never_slept(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await life.allocate(session, 2, [50, 51, 52])
        await detach(life, session)
        life = start()
        again = await resume(life, session.token)
        assert life.manager.match_prefix(TOKENS) == 8
        step = await life.call(again, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[2]))
        await life.write(again, step.step_id, 3, seed=2)
        step = await life.call(again, "append", blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[3]))
        await life.write(again, step.step_id, 1, seed=3)
        assert np.array_equal(await life.read(again, 1, len(TOKENS)), kv)
        await life.call(again, "fork", blocks_pb2.ForkRequest(parent_ids=[1], child_ids=[5]))
        await life.call(again, "free", blocks_pb2.FreeRequest(sequence_ids=[1, 2, 5]))
        life.manager.check_integrity()

    run(scenario())


def test_blocks_that_are_still_cached_are_not_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping session needs no memory, but what nobody else needed is found there."""

    async def scenario() -> None:
        life = start()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await detach(life, session)
        assert (life.manager.stats().cached_blocks, life.manager.stats().free_blocks) == (2, 62)
        read: list[int] = []
        load = life.core.device.load_blocks

        def noting(addresses: Any, block_ids: Any, *rest: Any) -> Any:
            read.extend(block_ids.tolist())
            return load(addresses, block_ids, *rest)

        monkeypatch.setattr(life.core.device, "load_blocks", noting)
        again = await resume(life, session.token)
        assert len(read) == 1
        assert np.array_equal(await life.read(again, 1, len(TOKENS)), kv)
        await detach(life, again)
        other = life.open()
        await life.allocate(other, 1, list(range(500, 500 + 64 * 4)))
        await life.call(other, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        third = await resume(life, session.token)
        assert len(read) == 4
        assert np.array_equal(await life.read(third, 1, len(TOKENS)), kv)

    run(scenario())


def test_an_empty_session_and_empty_sequences_come_back(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        empty, other = life.open("empty"), life.open("other")
        await life.compute(other, 1, TOKENS)
        await life.call(other, "truncate", blocks_pb2.TruncateRequest(sequence_ids=[1], lengths=[0]))
        await detach(life, empty)
        await detach(life, other)
        life = start()
        assert not (await resume(life, empty.token)).namespace.rows
        again = await resume(life, other.token)
        assert [(one.length, one.num_blocks) for one in life.manager.describe(again.namespace)] == [(0, 0)]

    run(scenario())


def test_a_later_detach_replaces_the_file_and_a_close_removes_it(start: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        again = await resume(life, session.token)
        await life.compute(again, 2, [7, 8])
        await detach(life, again)
        assert len(files(tmp_path)) == 1
        life = start()
        third = await resume(life, session.token)
        assert list(third.namespace.rows) == [1, 2]
        for _ in life.sessions.close_in_slices(third):
            pass
        await settle()
        assert files(tmp_path) == []
        assert (await resume_error(life, session.token)).reason == "UNKNOWN_SESSION"

    run(scenario())


def test_a_session_that_was_used_after_detach_stays_in_memory(start: Start, tmp_path: Path) -> None:
    """Its file has an older state, for which a client must ask."""

    async def scenario() -> None:
        life = start()
        session = life.open(detachable=True)
        await life.compute(session, 1, TOKENS)
        await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        await life.allocate(session, 2, [1, 2])
        life.sessions.detach(session, end_stream)
        assert len(life.sessions) == 1
        assert list(life.attach(session.token).namespace.rows) == [1, 2]
        life = start()
        with pytest.raises(UnknownSessionError):
            life.attach(session.token, reconnects=True)
        assert list((await resume(life, session.token)).namespace.rows) == [1]
        assert len(files(tmp_path)) == 1

    run(scenario())


def test_without_durable_the_time_alone_is_set(start: Start, clock: ManualClock, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.call(session, "detach", session_pb2.DetachRequest(ttl_s=500.0))
        life.sessions.detach(session, end_stream)
        clock.advance(499)
        assert len(life.sessions) == 1
        clock.advance(2)
        assert len(life.sessions) == 0
        assert files(tmp_path) == []

    run(scenario())


async def resume_error(life: Life, token: bytes) -> Any:
    with pytest.raises(Exception) as raised:  # noqa: PT011  the test compares it
        await resume(life, token)
    return raised.value


# ---- who gets it, and when


def test_others_get_nothing(start: Start) -> None:
    async def scenario() -> None:
        with caller("alice"):
            life = start()
            session = life.open()
            await life.compute(session, 1, TOKENS)
            await detach(life, session)
        for reboot in (False, True):
            life = start() if reboot else life
            for name in ("bob", ""):
                with caller(name):
                    assert (await resume_error(life, session.token)).reason == "UNKNOWN_SESSION"
            with caller("alice"):
                assert (await resume_error(life, b"x" * 16)).reason == "UNKNOWN_SESSION"
            assert life.sessions.num_foreign == 2
            assert not len(life.sessions)
        with caller("alice"):
            assert list((await resume(life, session.token)).namespace.rows) == [1]

    run(scenario())


def test_a_file_has_no_token_and_is_its_owners_alone(start: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = start()
        sessions = [life.open(), life.open()]
        for number, session in enumerate(sessions):
            await life.compute(session, 1, [number, 1, 2, 3, 4])
            await detach(life, session)
        folder = tmp_path / "disk" / "sessions"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(set(files(tmp_path))) == 2
        for name in files(tmp_path):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
            content = (folder / name).read_bytes()
            assert not any(one.token in content or one.token.hex().encode() in content for one in sessions)
            assert not any(one.token.hex() in name for one in sessions)

    run(scenario())


def test_two_callers_at_once_share_one_return(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        life = start()
        first, second = await asyncio.gather(resume(life, session.token, 2), resume(life, session.token, 3))
        assert first is second
        assert first.holder == 3
        assert life.core.saved.num_restored == 1

    run(scenario())


def test_a_session_whose_client_did_not_wait_sleeps_again(start: Start, clock: ManualClock, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        restoring = life.sessions.restoring(session.token)
        assert restoring is not None
        await restoring
        clock.advance(10)
        assert not len(life.sessions)
        assert len(files(tmp_path)) == 1
        await resume(life, session.token)

    run(scenario())


@pytest.mark.parametrize("ttl_s", [1.0, 0.0])
def test_a_file_expires_in_wall_time(start: Start, wall: WallClock, tmp_path: Path, ttl_s: float) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session, ttl_s)
        life = start()
        wall.now += (ttl_s or 1000.0) - 0.1
        await life.core.saved.expire()
        assert len(files(tmp_path)) == 1
        wall.now += 0.2
        assert (await resume_error(life, session.token)).reason == "UNKNOWN_SESSION"
        await life.core.saved.expire()
        assert files(tmp_path) == []
        assert life.core.saved.num_expired == 1

    run(scenario())


# ---- what is refused


@pytest.mark.parametrize("ttl_s", [-1.0, 1000.5, float("nan"), float("inf")])
def test_times_out_of_range_are_refused(start: Start, ttl_s: float) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        with pytest.raises(InvalidArgumentError, match=r"^ttl_s: "):
            await life.call(session, "detach", session_pb2.DetachRequest(ttl_s=ttl_s, durable=True))

    run(scenario())


@pytest.mark.parametrize("options", [{"disk": ""}, {"disk_sessions_gib": 0.0}])
def test_a_daemon_without_a_disk_says_so(start: Start, options: dict[str, Any]) -> None:
    async def scenario() -> None:
        life = start(**options)
        session = life.open()
        with pytest.raises(SavedSessionsOffError, match="disk_sessions_gib"):
            await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        await life.allocate(session, 1, TOKENS)
        await life.core.saved.run()

    run(scenario())


def test_a_folder_in_use_is_refused(start: Start, tmp_path: Path) -> None:
    start()
    with pytest.raises(InvalidArgumentError, match=r"^disk: .*in use by another daemon"):
        Life(HeldFiles(), disk=str(tmp_path / "disk"))


def test_a_scheduler_with_requests_is_refused(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        settings = scheduler_pb2.OpenSchedulerRequest()
        await life.call(session, "open_scheduler", settings)
        prompt = scheduler_pb2.ScheduledRequest(request_id=1, token_ids=TOKENS, max_tokens=4, width=1)
        await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[prompt]))
        with pytest.raises(FailedPreconditionError, match="1 unfinished requests"):
            await life.call(session, "detach", session_pb2.DetachRequest(durable=True))

    run(scenario())


def test_more_than_the_limit_is_refused_and_nothing_has_changed(start: Start, tmp_path: Path) -> None:
    """A file needs its blocks, its header and its manifest."""

    async def scenario() -> None:
        life = start(disk_sessions_gib=6 * 4096 / 2**30)
        session = life.open()
        await life.compute(session, 1, list(range(16)))
        await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        await life.allocate(session, 2, [1])
        with pytest.raises(QuotaExceededError) as raised:
            await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        assert raised.value.metadata["limit"] == "disk_sessions_gib"
        assert list(session.namespace.rows) == [1, 2]
        assert len(files(tmp_path)) == 1
        larger = life.open()
        await life.compute(larger, 1, list(range(100, 117)))
        with pytest.raises(QuotaExceededError):
            await life.call(larger, "detach", session_pb2.DetachRequest(durable=True))

    run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("failing", range(4))
def test_a_full_or_failing_disk_fails_the_detach_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, failing: int
) -> None:
    """Whichever write fails: the session goes on, and an older file stays."""

    async def scenario() -> None:
        life = start()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        await life.compute(session, 2, [9, 8], seed=2)
        left = [failing]
        write = os.pwritev

        def failing_write(*args: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            return write(*args)

        with monkeypatch.context() as patch:
            patch.setattr("kvservice.saved.file_io.os.pwritev", failing_write)
            request = session_pb2.DetachRequest(durable=True)
            if failing < 3:  # the blocks, the manifest, the header
                with pytest.raises(DiskFailedError if number == errno.EIO else DiskFullError):
                    await life.call(session, "detach", request)
            else:
                await life.call(session, "detach", request)
        assert len(files(tmp_path)) == 1
        assert np.array_equal(await life.read(session, 1, len(TOKENS)), kv)
        await life.allocate(session, 3, [1, 2])
        life.manager.check_integrity()
        again = await resume(start(), session.token)
        assert list(again.namespace.rows) == ([1] if failing < 3 else [1, 2])

    run(scenario())


def test_another_model_is_named_and_the_file_stays(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        error = await resume_error(start(weights="others"), session.token)
        assert "weights was '', is 'others'" in str(error)
        error = await resume_error(start(num_layers=3, head_size=64), session.token)
        assert isinstance(error, SessionNotRestoredError)
        assert error.metadata["cause"] == "another_model"
        assert "head_size was 32, is 64, num_layers was 2, is 3" in str(error)
        assert list((await resume(start(), session.token)).namespace.rows) == [1]

    run(scenario())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_blocks": 2}, "OUT_OF_BLOCKS"),
        ({"max_sequences": 1}, "QUOTA_EXCEEDED"),
        ({"max_sequence_tokens": 9}, "SESSION_NOT_RESTORED"),
    ],
)
def test_a_session_that_does_not_fit_stays_on_the_disk(start: Start, options: dict[str, Any], reason: str) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await life.allocate(session, 2, [1])
        await detach(life, session)
        life = start(**options)
        for _ in range(2):
            assert (await resume_error(life, session.token)).reason == reason
        assert not len(life.sessions)
        assert life.manager.stats().free_blocks == life.config.pool_blocks
        life.manager.check_integrity()
        assert list((await resume(start(), session.token)).namespace.rows) == [1, 2]

    run(scenario())


def test_a_session_waits_for_room(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        other = life.open()
        await life.allocate(other, 1, list(range(100, 100 + 62 * 4)))
        error = await resume_error(life, session.token)
        assert isinstance(error, OutOfBlocksError)
        assert (error.required, error.never) == (3, False)
        await life.call(other, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        await resume(life, session.token)
        life = start(max_sessions=1)
        life.open()
        assert (await resume_error(life, session.token)).reason == "QUOTA_EXCEEDED"

    run(scenario())


# ---- what happens meanwhile


class HeldTransfers:
    """Lets the copies of blocks wait."""

    def __init__(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        save = life.core.device.save_blocks

        async def held(*args: Any) -> Any:
            self.begun.set()
            await self.go_on.wait()
            return await save(*args)

        monkeypatch.setattr(life.core.device, "save_blocks", held)


def test_calls_are_refused_while_the_session_is_saved(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        transfers = HeldTransfers(life, monkeypatch)
        saving = asyncio.create_task(detach(life, session))
        await transfers.begun.wait()
        for method, request in (
            ("append", blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[1])),
            ("detach", session_pb2.DetachRequest(durable=True)),
            ("describe", blocks_pb2.DescribeRequest()),
        ):
            with pytest.raises(SessionBusyError):
                await life.call(session, method, request)
        transfers.go_on.set()
        assert (await saving).num_sequences == 1

    run(scenario())


@pytest.mark.parametrize("end", ["close", "take over", "cancel"])
def test_a_session_that_others_use_meanwhile_is_not_saved(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open(detachable=True)
        await life.compute(session, 1, TOKENS)
        transfers = HeldTransfers(life, monkeypatch)
        saving = asyncio.create_task(detach(life, session))
        await transfers.begun.wait()
        if end == "close":
            for _ in life.sessions.close_in_slices(session):
                pass
        elif end == "take over":
            life.attach(session.token, holder=5)
            await life.allocate(session, 2, [1])
        else:
            saving.cancel()
        expected = {"close": UnknownSessionError, "take over": SessionTakenError, "cancel": asyncio.CancelledError}
        if end == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await saving
        transfers.go_on.set()
        if end != "cancel":
            with pytest.raises(expected[end]):
                await saving
        await settle()
        assert files(tmp_path) == []
        assert life.core.saved.files is not None
        assert life.core.saved.files.files.used_bytes == 0
        if end != "close":
            await life.allocate(session, 3, [1])
        life.manager.check_integrity()

    run(scenario())


def test_steps_end_and_their_tokens_stay_pending(start: Start) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.allocate(session, 1, TOKENS)
        step = await life.call(session, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1]))
        life.manager.mark_layer(session.namespace, step.step_id, 0)
        await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        assert not session.namespace.steps
        await life.call(session, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1]))

    run(scenario())


# ---- kills


class Kills:
    """The states that a daemon leaves when it is killed at any line: its kept memory and its disk."""

    def __init__(self, held: HeldFiles, disk: Path, copies: Path) -> None:
        self._held, self._disk, self._copies = held, disk, copies
        self._last: tuple[Any, ...] = ()
        self.states: list[tuple[tuple[tuple[str, bytes], ...], Path, bool]] = []
        self.acknowledged = False

    def note(self) -> None:
        folder = self._disk / "sessions"
        entries = tuple(sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()))
        if (*entries, self.acknowledged) == self._last:
            return
        self._last = (*entries, self.acknowledged)
        copy = self._copies / str(len(self.states))
        shutil.copytree(self._disk, copy)
        self.states.append((self._held.content(), copy, self.acknowledged))


@pytest.mark.parametrize("again", [False, True])
def test_a_daemon_that_is_killed_at_any_stage_of_a_detach_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """With its kept memory the session is there as before. Without it, the file has all of it, or the one from before
    stays, and what was acknowledged is there."""
    inline_transfers(monkeypatch)

    async def scenario() -> None:
        held, disk = HeldFiles(), tmp_path / "disk"
        life = Life(held, disk=str(disk), **FEW)
        session = life.open(detachable=True)
        await random_session(life, session, 2, num_operations=8)
        earlier = await found(life, session) if again else None
        if again:
            await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        await life.compute(session, 500, TOKENS)
        expected = await found(life, session)
        kills = Kills(held, disk, tmp_path)
        with at_every_line(FOLDERS, kills.note):
            await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        kills.acknowledged = True
        with at_every_line(FOLDERS, kills.note):
            life.sessions.detach(session, end_stream)
        kills.note()
        life.kill()
        assert len(kills.states) > 5
        outcomes = set()
        for content, copy, acknowledged in kills.states:
            kept = HeldFiles.of(content)
            for files in (kept, HeldFiles()):
                after = Life(files, disk=str(copy), **FEW)
                seen = None
                with contextlib.suppress(UnknownSessionError):
                    seen = await found(after, await resume(after, session.token))
                assert seen == expected or (files is not kept and not acknowledged and seen == earlier)
                outcomes.add((files is kept, seen == expected))
                assert not list((copy / "sessions").glob("*.part"))
                after.manager.check_integrity()
                after.kill()
                files.close()
        assert outcomes == {(True, True), (False, True), (False, False)}

    run(scenario())


def test_a_daemon_that_is_killed_at_any_stage_of_a_return_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline_transfers(monkeypatch)

    async def scenario() -> None:
        disk = tmp_path / "disk"
        first = Life(HeldFiles(), disk=str(disk), **FEW)
        session = first.open()
        await random_session(first, session, 4)
        expected = await found(first, session)
        await detach(first, session)
        first.kill()
        held = HeldFiles()
        life = Life(held, disk=str(disk), **FEW)
        other = life.open("other", detachable=True)
        theirs = await life.compute(other, 1, list(range(200, 210)), seed=9)
        states: list[tuple[tuple[str, bytes], ...]] = []

        def note() -> None:
            if not states or held.content() != states[-1]:
                states.append(held.content())

        with at_every_line(FOLDERS, note):
            await resume(life, session.token)
        note()
        life.kill()
        assert len(states) > 50
        for number, content in enumerate(states[:: max(1, len(states) // 40)] + states[-1:]):
            kept = HeldFiles.of(content)
            copy = tmp_path / f"copy{number}"
            shutil.copytree(disk, copy)
            after = Life(kept, disk=str(copy), **FEW)
            assert after.core.report.outcome == "taken over"
            assert after.core.report.lost.sequences == 0
            again = await resume(after, session.token)
            assert await found(after, again) == expected
            assert np.array_equal(await after.read(after.attach(other.token), 1, 10), theirs)
            after.manager.check_integrity()
            after.kill()
            kept.close()

    run(scenario())


# ---- damage


def test_a_damaged_file_is_refused_whole(start: Start, wall: WallClock, tmp_path: Path) -> None:
    """Whichever byte changes, and wherever the file ends: the session comes back as it was, or not at all."""

    async def scenario() -> None:
        life = start()
        session = life.open()
        await random_session(life, session, 5)
        expected = await found(life, session)
        await detach(life, session)
        life.kill()
        path = next((tmp_path / "disk" / "sessions").glob("*.session"))
        whole = path.read_bytes()
        rng = np.random.default_rng(1)
        outcomes: set[str] = set()
        for turn in range(60):
            content = bytearray(whole)
            if turn % 3 == 0:
                content = content[: rng.integers(0, len(whole))]
            else:
                at = int(rng.integers(0, 200) if turn % 3 == 1 else rng.integers(0, len(whole)))
                content[at] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(content)
            after = Life(HeldFiles(), wall=wall, disk=str(tmp_path / "disk"))
            try:
                again = await resume(after, session.token)
                assert await found(after, again) == expected, "a byte that nobody reads was changed"
                outcomes.add("restored")
            except (SessionNotRestoredError, UnknownSessionError) as error:
                outcomes.add(error.metadata.get("cause", "removed"))
                assert not len(after.sessions)
                assert after.manager.stats().free_blocks == 64
                assert after.core.saved.files is not None
                assert after.core.saved.files.files.num_damaged == 1
            after.manager.check_integrity()
            after.kill()
        assert {"damaged", "removed"} <= outcomes

    run(scenario())
