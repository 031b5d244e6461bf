"""Other calls, and the end of the daemon, while a session is saved or restored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_calls import mark_layer
from daemon_lives import Life, end_stream
from kept_files import HeldFiles, at_every_line
from saved_rig import TOKENS, Reboot, WallClock, files, run
from sleeping import FEW, FOLDERS, HeldLoads, detach, found, inline_transfers, random_session, resume, settle
from waiting import PATIENCE_S

from kvservice.errors import (
    InvalidArgumentError,
    SessionBusyError,
    SessionTakenError,
    UnknownSessionError,
)
from kvservice.v1 import blocks_pb2, session_pb2

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


def test_calls_are_refused_while_the_session_is_saved(reboot: Reboot, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        life = reboot()
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
    reboot: Reboot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    async def scenario() -> None:
        life = reboot()
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


def test_steps_end_and_their_tokens_stay_pending(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        session = life.open()
        await life.allocate(session, 1, TOKENS)
        step = await life.call(session, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1]))
        mark_layer(life.manager, session.namespace, step.step_id, 0)
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
        entries = tuple(sorted((path.name, path.read_bytes()) for path in folder.iterdir()))
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
            for memory in (kept, HeldFiles()):
                after = Life(memory, disk=str(copy), **FEW)
                seen = None
                with contextlib.suppress(UnknownSessionError):
                    seen = await found(after, await resume(after, session.token))
                assert seen == expected or (memory is not kept and not acknowledged and seen == earlier)
                outcomes.add((memory is kept, seen == expected))
                assert not list((copy / "sessions").glob("*.part"))
                after.manager.check_integrity()
                after.kill()
                memory.close()
        assert outcomes == {(True, True), (False, True), (False, False)}

    run(scenario())


def test_a_daemon_that_is_killed_at_any_stage_of_a_return_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline_transfers(monkeypatch)

    async def scenario() -> None:
        disk = tmp_path / "disk"
        first = Life(disk=str(disk), **FEW)
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


# ---- while files are removed


class HeldRemovals:
    """Lets the removals of files wait, in their threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, self._go_on = threading.Semaphore(0), threading.Event()
        unlink = os.unlink

        def held(path: Any, **options: Any) -> None:
            if str(path).endswith(".session"):
                self._begun.release()
                assert self._go_on.wait(PATIENCE_S)
            unlink(path, **options)

        monkeypatch.setattr(os, "unlink", held)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.acquire, timeout=PATIENCE_S)

    def go_on(self) -> None:
        self._go_on.set()


async def expired(life: Life, wall: WallClock, count: int) -> list[Any]:
    """Return open sessions whose files have expired."""
    sessions = [life.open() for _ in range(count)]
    for session in sessions:
        await detach(life, session, 1.0)
        await resume(life, session.token)
    wall.advance(2)
    return [life.sessions.get(session.token) for session in sessions]


def test_sequences_that_are_swapped_out_while_files_are_removed(
    reboot: Reboot, wall: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is opened after the removal began, and its file is its own."""

    async def scenario() -> None:
        life = reboot()
        await expired(life, wall, 1)
        removals = HeldRemovals(monkeypatch)
        expiring = asyncio.create_task(life.core.saved.expire())
        await removals.begun()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS)
        tier = blocks_pb2.SWAP_TIER_DISK
        await life.call(session, "swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[1], tier=tier))
        removals.go_on()
        await expiring
        assert life.core.saved.stats().expired == 1
        await life.call(session, "swap_in", blocks_pb2.SwapInRequest(sequence_ids=[1]))
        assert np.array_equal(await life.read(session, 1, len(TOKENS)), kv)

    run(scenario())


def test_sequences_of_a_session_that_is_restored_while_files_are_removed(
    reboot: Reboot, wall: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file expires meanwhile. The sequences that it has on the disk stay."""

    async def scenario() -> None:
        life = reboot()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS)
        await life.compute(session, 2, [50, 51, 52, 53, 54])
        tier = blocks_pb2.SWAP_TIER_DISK
        await life.call(session, "swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[1], tier=tier))
        await detach(life, session, 1.0)
        life = reboot()
        loads = HeldLoads(life, monkeypatch)
        restoring = asyncio.create_task(resume(life, session.token))
        await loads.begun(1)
        wall.advance(2)
        await life.core.saved.expire()
        loads.go_on()
        again = await restoring
        await life.call(again, "swap_in", blocks_pb2.SwapInRequest(sequence_ids=[1]))
        assert np.array_equal(await life.read(again, 1, len(TOKENS)), kv)

    run(scenario())


@pytest.mark.parametrize("count", [1, 3])
def test_sessions_that_are_saved_again_while_their_files_are_removed(
    reboot: Reboot, wall: WallClock, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """One file is being removed, and others will be. All of them are written anew meanwhile, and stay."""

    async def scenario() -> None:
        life = reboot()
        sessions = await expired(life, wall, count)
        for number, session in enumerate(sessions):
            await life.compute(session, number, TOKENS[number:])
        removals = HeldRemovals(monkeypatch)
        expiring = asyncio.create_task(life.core.saved.expire())
        await removals.begun()
        first, *others = (asyncio.create_task(detach(life, session)) for session in sessions)
        if others:
            await asyncio.wait(others)
        assert not first.done()
        removals.go_on()
        await asyncio.wait([expiring, first])
        assert all(saved.result().num_sequences == 1 for saved in (first, *others))
        life = reboot()
        for number, session in enumerate(sessions):
            assert list((await resume(life, session.token)).namespace.rows) == [number]

    run(scenario())


# ---- a token names one session


async def open_with(life: Life, token: bytes) -> Any:
    request = session_pb2.OpenRequest(name="second", session_token=token)
    return await life.dispatcher.call("open", request, None, "unary", local=True)


@pytest.mark.parametrize("place", [0, 2])
def test_a_token_is_not_opened_anew_while_its_session_is_restored(
    reboot: Reboot, wall: WallClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    """The file expires meanwhile. The session reads its blocks, or still waits for those of two others."""

    async def scenario() -> None:
        life = reboot()
        sessions = [life.open(str(number)) for number in range(place + 1)]
        for number, session in enumerate(sessions):
            await life.compute(session, 1, [number * 100 + token for token in TOKENS])
            await detach(life, session, 1.0 if number == place else 100.0)
        life = reboot()
        token = sessions[place].token
        loads = HeldLoads(life, monkeypatch)
        restoring = [asyncio.create_task(resume(life, session.token)) for session in sessions]
        await loads.begun(min(2, place + 1))
        wall.advance(2)
        with pytest.raises(InvalidArgumentError, match="saved session"):
            await open_with(life, token)
        if place == 0:
            with pytest.raises(InvalidArgumentError, match="another session"):
                life.open(token=token)
            again = asyncio.create_task(resume(life, token, holder=3))
            await asyncio.sleep(0)
            assert not again.done(), "it waits for the same restore"
            restoring.append(again)
        loads.go_on()
        outcomes = await asyncio.gather(*restoring, return_exceptions=True)
        if place:  # the file was gone when its turn came
            assert isinstance(outcomes[place], UnknownSessionError)
            assert (await open_with(life, token)).session_token == token
        assert len(life.sessions) == place + 1
        for session in list(life.sessions):
            for _ in life.sessions.close_in_slices(session):
                pass
        await settle()
        assert (len(life.sessions), life.manager.stats().active_blocks, life.manager.stats().sequences) == (0, 0, 0)
        life.manager.check_integrity()
        assert repr(token)[2:-1] not in caplog.text

    run(scenario())


def test_a_session_shows_no_secrets(reboot: Reboot) -> None:
    async def scenario() -> None:
        session = reboot().open()
        for shown in (repr(session), repr(session.record())):
            assert "session_id=" in shown
            assert repr(session.token) not in shown
            assert session.token.hex() not in shown

    run(scenario())
