"""Child processes are kept running; what they were asked ends with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
from each_row import each_row
from mooncake_rig import keys_of
from waiting import PATIENCE_S, until

from kvservice.mooncake import MooncakeRequest, Operation
from kvservice.tiers import ChildrenPipe, TierError
from kvservice.tiers.mooncake import BACKOFF_MAX_S, BACKOFF_MIN_S, STEADY_S, Child, ChildKeeper

SUPPORT = Path(__file__).parents[1] / "support"
LIMIT_S = 60.0


def python_path() -> dict[str, str]:
    """Return the environment in which the child's module is found."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))}


def start(behaviour: str) -> Child:
    return Child("fake_mooncake_child", [behaviour], [], python_path())


def request(number: int = 0) -> Callable[[int], MooncakeRequest]:
    return lambda request_id: MooncakeRequest(Operation.EXIST, request_id, bytes(16), 4096, keys_of(number))


class Pauses:
    """The pauses of a keeper, each of which ends when the test says so."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self._ends = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.lengths.append(seconds)
        await self._ends.acquire()

    def end(self) -> None:
        self._ends.release()

    async def begins(self, count: int) -> None:
        """Wait until so many pauses have begun."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.lengths) < count:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(behaviour: str) -> AsyncIterator[Child]:
    one = start(behaviour)
    try:
        yield one
    finally:
        one.kill("the test ends")
        await one.ended()


def test_requests_are_answered_in_any_order() -> None:
    async def work() -> None:
        async with running("serve") as one:
            await one.ready
            bodies = await asyncio.gather(*(one.ask(request(number), LIMIT_S) for number in range(20)))
            assert bodies == [keys_of(number) for number in range(20)]

    asyncio.run(work())


def test_a_child_that_does_not_start_says_why() -> None:
    """It fails if the reason is another one, or if a request waits for the child."""
    with each_row() as row:
        for behaviour, reason in (("die", "has ended"), ("refuse", "failed to start: it has no wish to")):
            with row((behaviour, reason)):
                check_a_start_that_fails(behaviour, reason)


def check_a_start_that_fails(behaviour: str, reason: str) -> None:
    async def work() -> None:
        async with running(behaviour) as one:
            with pytest.raises(TierError):
                await one.ready
            assert await one.ended() == reason
            with pytest.raises(TierError, match=reason):
                await one.ask(request(), LIMIT_S)

    asyncio.run(work())


def test_requests_fail_when_the_process_has_ended() -> None:
    """It fails if a request ends before the process has, or for another reason."""
    with each_row() as row:
        for behaviour, limit_s, reason in (
            ("hang", 0.05, r"did not answer within 0\.05 s and was killed"),
            ("crash", LIMIT_S, "has ended"),
            ("long", LIMIT_S, "sent a reply that is too long"),
        ):
            with row((behaviour, limit_s, reason)):
                check_a_failing_request(behaviour, limit_s, reason)


def check_a_failing_request(behaviour: str, limit_s: float, reason: str) -> None:
    async def work() -> None:
        async with running(behaviour) as one:
            await one.ready
            with pytest.raises(TierError, match=reason):
                await one.ask(request(), limit_s)
            assert not Path(f"/proc/{one.pid}").exists()

    asyncio.run(work())


def test_requests_after_the_link_is_closed_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the process has ended, which the test holds up, there is a closed link. uvloop's raises RuntimeError for a
    write, asyncio's does not."""

    async def work() -> None:
        async with running("crash") as one:
            await one.ready
            closed, ends, end_of = asyncio.Event(), asyncio.Event(), one._exit

            async def held() -> None:
                closed.set()
                await ends.wait()
                await end_of()

            monkeypatch.setattr(one, "_exit", held)
            asked = asyncio.ensure_future(one.ask(request(), LIMIT_S))
            await closed.wait()
            try:
                assert not one.has_ended
                with pytest.raises(TierError, match="has ended"):
                    await one.ask(request(), LIMIT_S)
            finally:
                ends.set()
            with pytest.raises(TierError, match="has ended"):
                await asked

    uvloop.run(work())


PARENT = """
import asyncio, os, signal, sys, time
from kvservice.tiers.mooncake import Child

async def main():
    child = Child("fake_mooncake_child", ["silent"], [], {})
    os.kill(child.pid, signal.SIGSTOP)
    print(child.pid, flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def test_a_child_that_is_frozen_at_once_ends_with_its_parent() -> None:
    """It does nothing for its end itself, however far it has come."""
    command = [sys.executable, "-P", "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | python_path()) as parent:
        assert parent.stdout is not None
        frozen = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        until(lambda: state_of(frozen) == "T")
        parent.kill()
    until(lambda: state_of(frozen) in ("Z", ""))


def state_of(stat: Path) -> str:
    """Return the letter of a process's state, an empty string if it is gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_cancelled_request_ends_with_the_process() -> None:
    async def work() -> None:
        async with running("hang") as one:
            await one.ready
            asked = asyncio.ensure_future(one.ask(request(), LIMIT_S))
            await asyncio.sleep(0)
            for _ in range(3):
                asked.cancel()
                await asyncio.sleep(0)
            assert not asked.done()
            one.kill("the test says so")
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert not Path(f"/proc/{one.pid}").exists()

    asyncio.run(work())


def test_pauses_double_while_children_end_early() -> None:
    async def work() -> None:
        pauses = Pauses()
        keeper = ChildKeeper("the child", lambda: start("die"), pauses, lambda: 0.0)
        assert keeper.state == "opening"
        wanted = [BACKOFF_MIN_S]
        while wanted[-1] < BACKOFF_MAX_S:
            wanted.append(min(2 * wanted[-1], BACKOFF_MAX_S))
        for count in range(1, len(wanted) + 2):
            await pauses.begins(count)
            assert keeper.state == "failed"
            with pytest.raises(TierError, match="the child has ended"):
                keeper.child()
            pauses.end()
        assert pauses.lengths[: len(wanted) + 1] == [*wanted, BACKOFF_MAX_S]
        assert keeper.num_deaths >= len(wanted)
        await keeper.close()

    asyncio.run(work())


def test_a_child_that_lived_long_is_replaced_soon() -> None:
    """It fails if the pause before the next child is another one."""
    with each_row() as row:
        for lived_s, pause_s in ((STEADY_S, BACKOFF_MIN_S), (STEADY_S - 1, 2 * BACKOFF_MIN_S)):
            with row((lived_s, pause_s)):
                check_the_pause_after(lived_s, pause_s)


def check_the_pause_after(lived_s: float, pause_s: float) -> None:
    async def work() -> None:
        pauses, now = Pauses(), [0.0]
        behaviours = iter(["die", "serve", "serve"])
        keeper = ChildKeeper("the child", lambda: start(next(behaviours)), pauses, lambda: now[0])
        await pauses.begins(1)
        pauses.end()
        async with asyncio.timeout(PATIENCE_S):
            while keeper.state != "open":
                await asyncio.sleep(0.005)
        now[0] += lived_s
        keeper.child().kill("the test says so")
        await pauses.begins(2)
        assert pauses.lengths[1] == pause_s
        await keeper.close()

    asyncio.run(work())


def test_a_child_that_is_never_ready_is_killed() -> None:
    async def work() -> None:
        pauses = Pauses()
        keeper = ChildKeeper("the child", lambda: start("silent"), pauses, start_s=0.05)
        await pauses.begins(1)
        with pytest.raises(TierError, match=r"was not ready within 0\.05 s"):
            keeper.child()
        await keeper.close()

    asyncio.run(work())


def test_a_child_that_cannot_be_started_is_tried_again() -> None:
    async def work() -> None:
        def fail() -> Child:
            raise OSError(11, "no more processes")

        pauses = Pauses()
        keeper = ChildKeeper("the child", fail, pauses)
        await pauses.begins(1)
        with pytest.raises(TierError, match="cannot be started"):
            keeper.child()
        await keeper.close()

    asyncio.run(work())


def test_the_log_names_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        pauses = Pauses()
        behaviours = iter(["die", "die", "refuse", "serve", "serve"])
        keeper = ChildKeeper("the child", lambda: start(next(behaviours)), pauses, lambda: 0.0)
        for count in (1, 2, 3):
            await pauses.begins(count)
            pauses.end()
        async with asyncio.timeout(PATIENCE_S):
            while keeper.state != "open":
                await asyncio.sleep(0.005)
        await keeper.close()

    with caplog.at_level("INFO", logger="kvservice.tiers"):
        asyncio.run(work())
    assert [record.getMessage() for record in caplog.records] == [
        "the child has ended; another is started in 0.5 s",
        "the child failed to start: it has no wish to; another is started in 2 s",
        "the child is open after 0.00 s",
        "the child is closed",
    ]


def test_a_keeper_that_is_dropped_at_once_starts_nothing() -> None:
    started = []

    def begin() -> Child:
        started.append(1)
        return start("serve")

    async def work() -> None:
        ChildKeeper("the child", begin)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(work())
    assert not started


def test_a_start_waits_for_children_of_the_process_before() -> None:
    """The next process has the reading end only. Its own children count for the process after it."""
    pipe = ChildrenPipe()
    assert pipe.have_ended(0)
    later = ChildrenPipe(os.dup(pipe.fd))
    for starting in (pipe, later):
        with starting.writing() as writing:
            command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
            child = subprocess.Popen(command, pass_fds=[writing])
        with child:
            assert not later.have_ended(0)
            child.kill()
            assert later.have_ended()
    for one in (pipe, later):
        one.close()
