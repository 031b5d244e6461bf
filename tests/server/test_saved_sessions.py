"""Sessions on the disk: Detach writes them, a client with the token gets them back, in this daemon or a later one."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_lives import caller, end_stream
from each_row import each_row
from manual_clock import ManualClock
from saved_rig import TOKENS, Reboot, WallClock, files, resume_error, run
from sleeping import detach, found, random_session, resume, settle, sharing

from kvservice.errors import InvalidArgumentError, UnknownSessionError
from kvservice.v1 import blocks_pb2, session_pb2

# ---- what comes back


def test_a_random_session_comes_back_byte_by_byte_after_a_reboot(reboot: Reboot) -> None:
    async def scenario(seed: int) -> None:
        life = reboot()
        session = life.open("engine", tenant="acme")
        await random_session(life, session, seed)
        expected, tables = await found(life, session), sharing(life, session)
        keys = {name: life.manager.sequences.extra_keys.by_row.get(row) for name, row in session.namespace.rows.items()}
        response = await detach(life, session)
        assert response.num_sequences == len(expected)
        assert not len(life.sessions)
        assert life.manager.stats().sequences == 0
        life.manager.check_integrity()

        life = reboot()
        again = await resume(life, session.token)
        life.manager.check_integrity()
        assert (again.name, again.tenant, again.wait_s) == ("engine", "acme", 1000.0)
        assert list(again.namespace.rows) == list(expected)
        now = sharing(life, again)
        flat = [(one, other) for a, b in zip(tables, now, strict=True) for one, other in zip(a, b, strict=True)]
        assert len({one for one, _ in flat}) == len(set(flat)), "what was shared is not shared any more"
        assert keys == {
            name: life.manager.sequences.extra_keys.by_row.get(row) for name, row in again.namespace.rows.items()
        }
        assert await found(life, again) == expected
        life.manager.check_integrity()

    with each_row() as row:
        for seed in range(12):
            with row(seed):
                run(scenario(seed))


def test_the_session_goes_on_as_one_that_never_slept(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS, seed=1)
        await life.allocate(session, 2, [50, 51, 52])
        await detach(life, session)
        life = reboot()
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


def test_blocks_that_are_still_cached_are_not_read(reboot: Reboot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping session needs no memory, but what nobody else needed is found there."""

    async def scenario() -> None:
        life = reboot()
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


def test_an_empty_session_and_empty_sequences_come_back(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        empty, other = life.open("empty"), life.open("other")
        await life.compute(other, 1, TOKENS)
        await life.call(other, "truncate", blocks_pb2.TruncateRequest(sequence_ids=[1], lengths=[0]))
        await detach(life, empty)
        await detach(life, other)
        life = reboot()
        assert not (await resume(life, empty.token)).namespace.rows
        again = await resume(life, other.token)
        assert [(one.length, one.num_blocks) for one in life.manager.describe(again.namespace)] == [(0, 0)]

    run(scenario())


def test_a_later_detach_replaces_the_file_and_a_close_removes_it(reboot: Reboot, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        again = await resume(life, session.token)
        await life.compute(again, 2, [7, 8])
        await detach(life, again)
        assert len(files(tmp_path)) == 1
        life = reboot()
        third = await resume(life, session.token)
        assert list(third.namespace.rows) == [1, 2]
        for _ in life.sessions.close_in_slices(third):
            pass
        await settle()
        assert files(tmp_path) == []
        assert (await resume_error(life, session.token)).reason == "UNKNOWN_SESSION"

    run(scenario())


def test_a_session_that_was_used_after_detach_stays_in_memory(reboot: Reboot, tmp_path: Path) -> None:
    """Its file has an older state, for which a client must ask."""

    async def scenario() -> None:
        life = reboot()
        session = life.open(detachable=True)
        await life.compute(session, 1, TOKENS)
        await life.call(session, "detach", session_pb2.DetachRequest(durable=True))
        await life.allocate(session, 2, [1, 2])
        life.sessions.detach(session, end_stream)
        assert len(life.sessions) == 1
        assert list(life.attach(session.token).namespace.rows) == [1, 2]
        life = reboot()
        with pytest.raises(UnknownSessionError):
            life.attach(session.token, reconnects=True)
        assert list((await resume(life, session.token)).namespace.rows) == [1]
        assert len(files(tmp_path)) == 1

    run(scenario())


def test_without_durable_the_time_alone_is_set(reboot: Reboot, clock: ManualClock, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await life.call(session, "detach", session_pb2.DetachRequest(ttl_s=500.0))
        life.sessions.detach(session, end_stream)
        clock.advance(499)
        assert len(life.sessions) == 1
        clock.advance(2)
        assert len(life.sessions) == 0
        assert files(tmp_path) == []

    run(scenario())


# ---- who gets it, and when


def test_others_get_nothing(reboot: Reboot) -> None:
    async def scenario() -> None:
        with caller("alice"):
            life = reboot()
            session = life.open()
            await life.compute(session, 1, TOKENS)
            await detach(life, session)
        for is_later in (False, True):
            life = reboot() if is_later else life
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


def test_nobody_opens_another_session_with_the_token_of_one_that_is_there(reboot: Reboot) -> None:
    """Neither while it is on the disk, whose file the other one would remove, nor with another identity."""

    async def opening(life: Any, token: bytes) -> Any:
        request = session_pb2.OpenRequest(session_token=token)
        return await life.dispatcher.call("open", request, None, "unary", local=True)

    async def scenario() -> None:
        with caller("alice"):
            life = reboot()
            session = life.open()
            await life.compute(session, 1, TOKENS)
            await detach(life, session)
        for name in ("alice", "bob"):
            with caller(name), pytest.raises(InvalidArgumentError) as refused:
                await opening(life, session.token)
            assert refused.value.field == "session_token"
        with caller("alice"):
            found, other = await resume(life, session.token), life.open()
            assert (await opening(life, session.token)).session_id == found.session_id
        with caller("bob"), pytest.raises(UnknownSessionError):
            await opening(life, other.token)
        assert life.sessions.num_foreign == 1
        assert list(found.namespace.rows) == [1]

    run(scenario())


def test_a_file_has_no_token_and_is_its_owners_alone(reboot: Reboot, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
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


def test_two_callers_at_once_share_one_return(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session)
        life = reboot()
        first, second = await asyncio.gather(resume(life, session.token, 2), resume(life, session.token, 3))
        assert first is second
        assert first.holder == 3
        assert life.core.saved.stats().restored == 1

    run(scenario())


def test_a_session_whose_client_did_not_wait_sleeps_again(reboot: Reboot, clock: ManualClock, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
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


def test_a_file_expires_in_wall_time(reboot: Reboot, wall: WallClock, tmp_path: Path) -> None:
    async def scenario(ttl_s: float) -> None:
        life = reboot()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        await detach(life, session, ttl_s)
        life = reboot()
        wall.advance((ttl_s or 1000.0) - 0.1)
        await life.core.saved.expire()
        assert len(files(tmp_path)) == 1
        wall.advance(0.2)
        assert (await resume_error(life, session.token)).reason == "UNKNOWN_SESSION"
        await life.core.saved.expire()
        assert files(tmp_path) == []
        assert life.core.saved.stats().expired == 1

    for ttl_s in (1.0, 0.0):
        run(scenario(ttl_s))


def test_a_clock_that_is_set_removes_no_file(reboot: Reboot, wall: WallClock, tmp_path: Path) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await detach(life, session, 10.0)
        for seconds in (-1e6, 1e6):
            wall.zero += seconds
            await life.core.saved.expire()
            assert len(files(tmp_path)) == 1
            await resume(life, session.token)

    run(scenario())
