"""Requests and replies over a socket pair."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from kvservice.telemetry import Asker, answer_all, open_link


async def connected(answer: object) -> tuple[Asker, asyncio.Task[None]]:
    ours, theirs = socket.socketpair()
    task = asyncio.create_task(answer_all(*await open_link(theirs), answer))  # type: ignore[arg-type]
    return Asker(*await open_link(ours)), task


def test_every_question_gets_its_own_answer() -> None:
    async def run() -> None:
        async def answer(question: bytes) -> bytes:
            await asyncio.sleep(0)
            return question * 2

        asker, task = await connected(answer)
        questions = [bytes([n]) * n * 1000 for n in range(20)]
        assert await asyncio.gather(*map(asker.ask, questions)) == [question * 2 for question in questions]
        asker.close()
        await asyncio.wait_for(task, 10)

    asyncio.run(run())


def test_a_question_that_was_given_up_does_not_shift_the_answers() -> None:
    async def run() -> None:
        let_go = asyncio.Event()

        async def answer(question: bytes) -> bytes:
            await let_go.wait()
            return question

        asker, task = await connected(answer)
        given_up = asyncio.create_task(asker.ask(b"first"))
        await asyncio.sleep(0.01)
        given_up.cancel()
        second = asyncio.create_task(asker.ask(b"second"))
        await asyncio.sleep(0.01)
        let_go.set()
        assert await asyncio.wait_for(second, 10) == b"second"
        with pytest.raises(asyncio.CancelledError):
            await given_up
        asker.close()
        await asyncio.wait_for(task, 10)

    asyncio.run(run())


def test_a_closed_end_is_reported() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        asker = Asker(*await open_link(ours))
        theirs.close()
        with pytest.raises(ConnectionError):
            await asker.ask(b"anyone there?")
        asker.close()

    asyncio.run(run())


def test_requests_that_wait_for_a_link_that_is_closed_fail() -> None:
    """The other end does not answer, so the second request waits for its turn. It must not write to a closed link."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            asker = Asker(*await open_link(ours))
            asked = [asyncio.ensure_future(asker.ask(b"s")) for _ in range(2)]
            await asyncio.sleep(0)
            asker.close()
            for one in asked:
                with pytest.raises(ConnectionError):
                    await one

    uvloop.run(run())
