"""Sessions that are not saved, or not restored: limits, disks that fail, other models, damage."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life
from each_row import each_row
from kept_files import HeldFiles
from odd_entries import ODD_ENTRIES, make_odd_entry
from saved_rig import TOKENS, Reboot, WallClock, files, resume_error, run
from saved_rig import file_of as name_of
from sleeping import FEW, detach, found, random_session, resume

from kvservice.errors import (
    DiskFailedError,
    DiskFullError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfBlocksError,
    QuotaExceededError,
    SavedSessionsOffError,
    SessionNotRestoredError,
)
from kvservice.v1 import blocks_pb2, scheduler_pb2, session_pb2

DISK = blocks_pb2.SWAP_TIER_DISK
# A file that does not say when it expires stays for a day.
DAMAGED_S = 86400.0


# ---- what is refused


def test_times_out_of_range_are_refused(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        with each_row() as row:
            for ttl_s in (-1.0, 1000.5, float("nan"), float("inf")):
                with row(ttl_s), pytest.raises(InvalidArgumentError, match=r"^ttl_s: "):
                    await life.call(session, "detach", session_pb2.DetachRequest(ttl_s=ttl_s, durable=True))

    run(scenario())


def test_a_daemon_without_a_disk_says_so(reboot: Reboot) -> None:
    rows: list[dict[str, Any]] = [{"disk": ""}, {"disk_sessions_gib": 0.0}]

    async def scenario() -> None:
        for options in rows:
            life = reboot(**options)
            session = life.open()
            with pytest.raises(SavedSessionsOffError, match="disk_sessions_gib"):
                await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
            await life.allocate(session, 1, TOKENS)
            await life.core.saved.run()

    run(scenario())


def test_a_folder_in_use_is_refused(reboot: Reboot, tmp_path: Path) -> None:
    reboot()
    with pytest.raises(InvalidArgumentError, match=r"^disk: .*in use by another daemon"):
        Life(HeldFiles(), disk=str(tmp_path / "disk"))


def test_a_scheduler_with_requests_is_refused(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        settings = scheduler_pb2.OpenSchedulerRequest()
        await life.call(session, "open_scheduler", settings)
        prompt = scheduler_pb2.ScheduledRequest(request_id=1, token_ids=TOKENS, max_tokens=4, width=1)
        await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[prompt]))
        with pytest.raises(FailedPreconditionError, match="1 unfinished requests"):
            await life.call(session, "detach", session_pb2.DetachRequest(durable=True))

    run(scenario())


def test_more_than_the_limit_is_refused_and_nothing_has_changed(reboot: Reboot, tmp_path: Path) -> None:
    """A file needs its blocks, its header and its manifest."""

    async def scenario() -> None:
        life = reboot(disk_sessions_gib=6 * 4096 / 2**30)
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


def test_a_full_or_failing_disk_fails_the_detach_alone(
    reboot: Reboot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write fails: the session goes on, and an older file stays."""

    async def scenario(number: int, failing: int) -> None:
        disk = tmp_path / f"{number} {failing}"
        life = reboot(disk=str(disk), **FEW)
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
            patch.setattr(os, "pwritev", failing_write)
            request = session_pb2.DetachRequest(durable=True)
            if failing < 3:  # the blocks, the manifest, the header
                with pytest.raises(DiskFailedError if number == errno.EIO else DiskFullError):
                    await life.call(session, "detach", request)
            else:
                await life.call(session, "detach", request)
        assert len(list((disk / "sessions").glob("*.session*"))) == 1
        assert np.array_equal(await life.read(session, 1, len(TOKENS)), kv)
        await life.allocate(session, 3, [1, 2])
        life.manager.check_integrity()
        assert life.core.saved.stats().errors == (failing < 3)
        again = await resume(reboot(disk=str(disk), **FEW), session.token)
        assert list(again.namespace.rows) == ([1] if failing < 3 else [1, 2])

    with each_row() as row:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            for failing in range(4):
                with row((errno.errorcode[number], failing)):
                    run(scenario(number, failing))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_folder_that_is_gone_fails_calls_alone(
    reboot: Reboot, wall: WallClock, tmp_path: Path, is_replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon lives, and counts the failures. All is as before when the folder is back."""

    async def scenario() -> None:
        life = reboot()
        session, asleep, over = life.open(), life.open(), life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await life.compute(session, 2, [9, 8])
        await life.call(session, "swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[2], tier=DISK))
        await detach(life, asleep)
        await detach(life, over, 1.0)
        folder, elsewhere = tmp_path / "disk" / "sessions", tmp_path / "elsewhere"
        folder.rename(elsewhere)
        if is_replaced:
            shutil.copytree(elsewhere, folder, ignore=shutil.ignore_patterns("*.s*"))
        reason = "not the folder that the daemon found at its start" if is_replaced else "No such file or directory"
        for method, request in (
            ("detach", session_pb2.DetachRequest(durable=True)),
            ("swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[1], tier=DISK)),
            ("swap_in", blocks_pb2.SwapInRequest(sequence_ids=[2])),
        ):
            with pytest.raises(DiskFailedError, match=reason):
                await life.call(session, method, request)
        assert (await resume_error(life, asleep.token)).reason == "DISK_FAILED"
        wall.advance(2)
        await life.core.saved.expire()
        assert (life.core.saved.stats().errors, life.core.saved.stats().num_sessions) == (5, 2)
        assert f"the disk with the saved sessions in {folder} failed: " in caplog.text
        assert np.array_equal(await life.read(session, 1, len(TOKENS)), kv)
        life.manager.check_integrity()
        if is_replaced:
            shutil.rmtree(folder)
        elsewhere.rename(folder)
        await life.call(session, "swap_in", blocks_pb2.SwapInRequest(sequence_ids=[2]))
        await resume(life, asleep.token)
        await life.core.saved.expire()
        assert life.core.saved.stats().expired == 1
        await detach(life, session)
        assert list((await resume(reboot(), session.token)).namespace.rows) == [1, 2]

    run(scenario())


def test_a_missing_file_is_refused_until_it_is_back(
    reboot: Reboot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        life = reboot()
        session, other = life.open(), life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        (name,) = files(tmp_path)
        await detach(life, other)
        path = tmp_path / "disk" / "sessions" / name
        path.rename(tmp_path / name)
        error = await resume_error(life, session.token)
        assert isinstance(error, SessionNotRestoredError)
        assert error.metadata["cause"] == "damaged"
        assert f"{path} is refused: it is missing" in caplog.text
        assert (life.core.saved.stats().damaged, life.core.saved.stats().errors) == (1, 0)
        await resume(life, other.token)
        (tmp_path / name).rename(path)
        assert list((await resume(life, session.token)).namespace.rows) == [1]

    run(scenario())


def test_a_file_that_cannot_be_removed_is_removed_later(
    reboot: Reboot, wall: WallClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        life = reboot()
        await detach(life, life.open(), 1.0)
        wall.advance(2)

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            await life.core.saved.expire()
        assert (life.core.saved.stats().num_sessions, life.core.saved.stats().errors) == (1, 1)
        await life.core.saved.expire()
        assert (life.core.saved.stats().num_sessions, files(tmp_path)) == (0, [])

    run(scenario())


def test_another_model_is_named_and_the_file_stays(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        error = await resume_error(reboot(weights="others"), session.token)
        assert "weights was '', is 'others'" in str(error)
        error = await resume_error(reboot(num_layers=3, head_size=64), session.token)
        assert isinstance(error, SessionNotRestoredError)
        assert error.metadata["cause"] == "another_model"
        assert "head_size was 32, is 64, num_layers was 2, is 3" in str(error)
        assert list((await resume(reboot(), session.token)).namespace.rows) == [1]

    run(scenario())


def test_a_session_that_does_not_fit_stays_on_the_disk(reboot: Reboot) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"num_blocks": 2}, "OUT_OF_BLOCKS"),
        ({"max_sequences": 1}, "QUOTA_EXCEEDED"),
        ({"max_sequence_tokens": 9}, "SESSION_NOT_RESTORED"),
    ]

    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await life.allocate(session, 2, [1])
        await detach(life, session)
        with each_row() as row:
            for options, reason in rows:
                with row(options):
                    life = reboot(**options)
                    for _ in range(2):
                        assert (await resume_error(life, session.token)).reason == reason
                    assert not len(life.sessions)
                    assert life.manager.stats().free_blocks == life.config.pool_blocks
                    life.manager.check_integrity()
        assert list((await resume(reboot(), session.token)).namespace.rows) == [1, 2]

    run(scenario())


def test_a_session_waits_for_room(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
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
        life = reboot(max_sessions=1)
        life.open()
        assert (await resume_error(life, session.token)).reason == "QUOTA_EXCEEDED"

    run(scenario())


# ---- damage


def test_a_damaged_file_is_refused_whole(reboot: Reboot, wall: WallClock, tmp_path: Path) -> None:
    """Whichever byte changes, and wherever the file ends: the session comes back as it was, or not at all."""

    async def scenario() -> None:
        life = reboot(**FEW)
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
            after = Life(wall=wall, disk=str(tmp_path / "disk"), **FEW)
            try:
                again = await resume(after, session.token)
                assert await found(after, again) == expected, "a byte that nobody reads was changed"
                outcomes.add("restored")
            except SessionNotRestoredError as error:
                outcomes.add(error.metadata["cause"])
                assert not len(after.sessions)
                assert after.manager.stats().free_blocks == 64
                # A damaged header is found at the start, too.
                assert after.core.saved.stats().damaged in (1, 2)
                assert path.read_bytes() == content
            after.manager.check_integrity()
            after.kill()
        assert "damaged" in outcomes

    run(scenario())


def test_a_session_gets_no_file_of_another(reboot: Reboot, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        life = reboot()
        sessions = [life.open(), life.open()]
        for number, session in enumerate(sessions):
            await life.compute(session, number, TOKENS[number:])
            await detach(life, session)
        folder = tmp_path / "disk" / "sessions"
        names = [name_of(session.token) for session in sessions]
        (folder / names[0]).unlink()
        (folder / names[1]).rename(folder / names[0])
        for after in (lambda: life, reboot):
            error = await resume_error(after(), sessions[0].token)
            assert (type(error), error.metadata["cause"]) == (SessionNotRestoredError, "damaged")
            assert f"{names[0]} is refused: it was written as {names[1]}" in caplog.text
            caplog.clear()
        (folder / names[0]).rename(folder / names[1])
        assert list((await resume(reboot(), sessions[1].token)).namespace.rows) == [1]

    run(scenario())


def test_what_is_no_file_is_damaged_and_the_disk_is_well(reboot: Reboot, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
        with each_row() as row:
            for kind in ODD_ENTRIES:
                with row(kind):
                    session = life.open()
                    await detach(life, session)
                    path = tmp_path / "disk" / "sessions" / name_of(session.token)
                    path.unlink()
                    make_odd_entry(path, kind)
                    error = await resume_error(life, session.token)
                    assert (type(error), error.metadata["cause"]) == (SessionNotRestoredError, "damaged")
                    assert (life.core.saved.stats().errors, life.core.saved.note) == (0, "")

    run(scenario())


def test_files_that_others_have_removed_take_no_room(
    reboot: Reboot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They count again when they are back."""

    async def scenario() -> None:
        life = reboot()
        sessions = [life.open() for _ in range(3)]
        for session in sessions:
            await detach(life, session)
        saved = life.core.saved
        used = saved.stats().used_bytes
        folder = tmp_path / "disk" / "sessions"
        paths = [folder / name_of(session.token) for session in sessions[:2]]
        for path in paths:
            path.rename(tmp_path / path.name)
        for _ in range(2):
            await saved.expire()
        assert saved.stats().used_bytes == used // 3
        assert caplog.text.count(f"files of saved sessions that are gone from {folder}: 2") == 1
        (tmp_path / paths[0].name).rename(paths[0])
        await saved.expire()
        assert saved.stats().used_bytes == used // 3 * 2
        await resume(life, sessions[0].token)
        again = life.sessions.get(sessions[0].token)
        await detach(life, again)
        assert saved.stats().used_bytes == used // 3 * 2

    run(scenario())


def test_a_disk_that_fails_is_noted(reboot: Reboot, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        folder = tmp_path / "disk" / "sessions"
        assert life.core.saved.note == ""
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(DiskFailedError):
            await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        reason = f"[Errno 2] No such file or directory: '{folder}'"
        assert life.core.saved.note == f"the disk of the saved sessions, {tmp_path / 'disk'}, fails: {reason}"
        (tmp_path / "elsewhere").rename(folder)
        await life.core.saved.expire()
        assert life.core.saved.note == ""

    run(scenario())


def test_a_file_without_a_header_is_refused_for_a_day(reboot: Reboot, wall: WallClock, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        path = next((tmp_path / "disk" / "sessions").glob("*.session"))
        path.write_bytes(b"")
        life = reboot()
        wall.advance(DAMAGED_S - 1)
        await life.core.saved.expire()
        error = await resume_error(life, session.token)
        assert (type(error), error.metadata["cause"]) == (SessionNotRestoredError, "damaged")
        wall.advance(2)
        await life.core.saved.expire()
        assert files(tmp_path) == []

    run(scenario())
