"""More sequences and sessions than there are places come back from the disk at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from daemon_lives import Life
from saved_rig import TOKENS, Reboot, run
from sleeping import HeldLoads, detach, resume, settle, swap_in, swap_out
from tenant_rig import calling, tenant_options

from kvservice.errors import InternalError, SessionTakenError


async def swapped_sessions(life: Life, count: int) -> list[Any]:
    """Return sessions whose sequence 1 is on the disk, and none of its blocks in memory."""
    sessions = [life.open(f"engine {number}") for number in range(count)]
    for number, session in enumerate(sessions):
        await life.compute(session, 1, [number * 100 + token for token in TOKENS], seed=number)
        await swap_out(life, session, 1)
    life.manager.reset_prefix_cache()
    return sessions


def test_more_swap_ins_at_once_than_there_are_places(reboot: Reboot) -> None:
    async def scenario() -> None:
        life = reboot()
        sessions = await swapped_sessions(life, 5)
        for _ in range(4):
            moved = await asyncio.gather(*[swap_in(life, session, 1) for session in sessions])
            assert moved == [3] * 5
            await asyncio.gather(*[swap_out(life, session, 1) for session in sessions])
            life.manager.reset_prefix_cache()
        life.manager.check_integrity()

    run(scenario())


def test_swap_ins_for_which_there_is_no_memory_leave_their_places_to_others(
    reboot: Reboot, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        life = reboot()
        sessions = await swapped_sessions(life, 3)
        with monkeypatch.context() as patch:
            patch.setattr(life.manager, "open_namespace", Mock(side_effect=MemoryError))
            for session in sessions:
                with pytest.raises(InternalError):
                    await swap_in(life, session, 1)
        assert await asyncio.gather(*[swap_in(life, session, 1) for session in sessions]) == [3] * 3
        life.manager.check_integrity()

    run(scenario())


@pytest.mark.parametrize("cut_short", [[0], [1, 3], [2, 4], [0, 1, 2, 3, 4]])
def test_swap_ins_that_are_cut_short_leave_their_places_to_others(
    reboot: Reboot, monkeypatch: pytest.MonkeyPatch, cut_short: list[int]
) -> None:
    """Some read their blocks when their sessions are taken over, others still wait for a place."""

    async def scenario() -> None:
        life = reboot()
        sessions = await swapped_sessions(life, 5)
        loads = HeldLoads(life, monkeypatch)
        swaps = [asyncio.create_task(swap_in(life, session, 1)) for session in sessions]
        await loads.begun(2)
        for number in cut_short:
            life.attach(sessions[number].token, holder=2)
        loads.go_on()
        outcomes = await asyncio.gather(*swaps, return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            assert isinstance(outcome, SessionTakenError) if number in cut_short else outcome == 3
        await settle()
        life.manager.check_integrity()
        again = await asyncio.gather(*[swap_in(life, sessions[number], 1) for number in cut_short])
        assert len(again) == len(cut_short)
        assert [list(session.namespace.rows) for session in sessions] == [[1]] * 5

    run(scenario())


def test_swap_ins_that_are_cut_short_after_their_blocks_are_read(
    reboot: Reboot, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        life = reboot()
        sessions = await swapped_sessions(life, 5)
        swaps = life.core.saved.swaps
        restore = swaps._restore

        async def then_taken(files: Any, session: Any, *arguments: Any) -> Any:
            read = await restore(files, session, *arguments)
            life.attach(session.token, 2)
            return read

        with monkeypatch.context() as taken:
            taken.setattr(swaps, "_restore", then_taken)
            outcomes = await asyncio.gather(*[swap_in(life, one, 1) for one in sessions], return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {SessionTakenError}
        await asyncio.gather(*[swap_in(life, session, 1) for session in sessions])
        await settle()
        life.manager.check_integrity()

    run(scenario())


@pytest.mark.parametrize("way", ["swap in", "attach"])
def test_a_tenant_with_many_transfers_leaves_a_place_to_others(
    reboot: Reboot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    async def scenario() -> None:
        life = reboot(**tenant_options(tmp_path))
        transfers = []
        for number, name in enumerate(["alice", "alice", "alice", "bob"]):
            with calling(name):
                session = life.open(detachable=True)
                await life.compute(session, 1, [number * 100 + token for token in TOKENS])
                await (swap_out(life, session, 1) if way == "swap in" else detach(life, session))
            transfers.append((name, session))
        await settle()
        life.manager.reset_prefix_cache()
        loads = HeldLoads(life, monkeypatch)
        tasks: list[asyncio.Task[Any]] = []
        for name, session in transfers:
            with calling(name):
                back = swap_in(life, session, 1) if way == "swap in" else resume(life, session.token)
                tasks.append(asyncio.create_task(back))
        await loads.begun(2)
        loads.go_on(others=False)
        first: set[asyncio.Task[Any]] = set()
        while len(first) < 2:
            done, _ = await asyncio.wait({*tasks} - first, return_when=asyncio.FIRST_COMPLETED)
            first |= done
        assert first == {tasks[0], tasks[-1]}, "one place is of another tenant"
        loads.go_on()
        await asyncio.gather(*tasks)
        await settle()
        life.manager.check_integrity()

    run(scenario())
