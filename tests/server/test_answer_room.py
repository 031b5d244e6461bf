"""The room that large answers have while they are made and sent, for each session and address."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from unittest.mock import Mock

from each_row import each_row

from kvservice.config import ServeConfig
from kvservice.server.rpc.slots import (
    ADDRESS_UNREAD_BYTES,
    CARELESS_S,
    SESSION_UNREAD_BYTES,
    UNREAD_BYTES,
    AnswerRoom,
    Rpc,
)

MADE_BYTES = ServeConfig().max_message_bytes // 2


class Answering:
    """RPCs that have large answers made, of sessions and addresses."""

    def __init__(self, address: str = "") -> None:
        self.room = AnswerRoom(MADE_BYTES)
        self.address = address
        self.begun: list[str] = []
        self._tasks: dict[Rpc, asyncio.Task[None]] = {}

    async def call(self, session: str, address: str = "") -> Rpc:
        rpc = Rpc(Mock(), None, Mock(), "other call", session=session.encode(), address=address or self.address)

        async def begin() -> None:
            try:
                await self.room.begin(rpc)
                self.begun.append(session)
                await asyncio.Event().wait()
            finally:
                if rpc.num_making:
                    self.room.end(rpc)

        self._tasks[rpc] = asyncio.create_task(begin())
        await asyncio.sleep(0)
        return rpc

    async def end(self, *rpcs: Rpc) -> None:
        for rpc in rpcs:
            self._tasks[rpc].cancel()
        await asyncio.wait([self._tasks.pop(rpc) for rpc in rpcs])
        await asyncio.sleep(0)

    def assert_empty(self) -> None:
        assert not self.room.num_bytes
        room = self.room
        assert (dict(room._of_party), dict(room._of_address), room._waiting) == ({}, {}, {})


def test_a_session_or_an_address_has_its_part_of_the_room_for_large_answers() -> None:
    async def scenario(address: str, same_session: bool, limit: int) -> None:
        made = Answering(address)
        mine = [await made.call("mine" if same_session else f"mine {i}") for i in range(2 * UNREAD_BYTES // MADE_BYTES)]
        assert len(made.begun) == limit // MADE_BYTES
        other = await made.call("other", "10.0.0.2" if address else "")
        assert ("other" in made.begun) == (limit < UNREAD_BYTES)
        await made.end(*mine, other)
        made.assert_empty()

    with each_row() as row:
        for address, same_session, limit in (
            ("", True, SESSION_UNREAD_BYTES),
            ("10.0.0.1", True, SESSION_UNREAD_BYTES),
            ("10.0.0.1", False, ADDRESS_UNREAD_BYTES),
            ("", False, UNREAD_BYTES),
        ):
            with row(f"{address} {same_session}"):
                asyncio.run(scenario(address, same_session, limit))


def test_who_has_least_of_the_room_is_served_first() -> None:
    """A session that asks for one answer does not wait for the many that others asked for before."""

    async def scenario() -> None:
        made = Answering()
        many = [await made.call(f"flood {i % 8}") for i in range(4 * UNREAD_BYTES // MADE_BYTES)]
        one, another = await made.call("one"), await made.call("another")
        num_begun = len(made.begun)
        assert num_begun == UNREAD_BYTES // MADE_BYTES
        await made.end(many[0])
        await made.end(many[1])
        await made.end(many[2])
        assert made.begun[num_begun:] == ["one", "another", "flood 0"]
        await made.end(one, another, *many[3:])
        made.assert_empty()

    asyncio.run(scenario())


def test_sessions_that_have_the_same_of_the_room_are_served_by_turns() -> None:
    async def scenario() -> None:
        made = Answering()
        many = [await made.call(f"{i % 8}") for i in range(UNREAD_BYTES // MADE_BYTES)]
        begun = made.begun[:]
        calls = [await made.call(session) for session in "aaabb"]
        await made.end(many[0])
        for i in (0, 3, 1, 4):
            assert calls[i].num_making
            await made.end(calls[i])
        assert made.begun == [*begun, *"ababa"]
        await made.end(calls[2], *many[1:])
        made.assert_empty()

    asyncio.run(scenario())


def test_those_that_did_not_read_have_one_part_of_the_room_for_some_time() -> None:
    async def scenario() -> None:
        made, num_parts = Answering(), SESSION_UNREAD_BYTES // MADE_BYTES

        async def begin(*sessions: str) -> list[Rpc]:
            return [await made.call(session) for session in sessions for _ in range(2 * num_parts)]

        before = await begin("a")
        for rpc in (before[0], Rpc(Mock(), None, Mock(), "other call", session=b"b")):
            made.room.note_careless(rpc, 100.0)
        careless = await begin("a", "b")
        assert Counter(made.begun) == {"a": num_parts + num_parts}, "what began before is not in their part"
        other = await made.call("c")
        assert other.num_making
        made.begun.clear()
        made.room.forget_careless(100.0 + CARELESS_S)
        await asyncio.sleep(0)
        assert Counter(made.begun) == {"b": num_parts}, "a has its part already"
        await made.end(*before, *careless, other)
        made.assert_empty()

    asyncio.run(scenario())


def test_calls_for_large_answers_that_end_while_they_wait() -> None:
    """Also in the moment in which they may begin. At random, with a model that counts."""

    async def scenario(seed: int) -> None:
        made, random = Answering(), Random(seed)
        calls: list[Rpc] = []
        most_waiting = 0
        for _ in range(1500):
            if not calls or random.random() < 0.97:
                where = random.choice(("", "10.0.0.1", "10.0.0.2"))
                calls.append(await made.call(str(random.randrange(6)), where))
            else:
                gone = random.sample(calls, random.randrange(1, min(len(calls), 60) + 1))
                calls = [rpc for rpc in calls if rpc not in gone]
                await made.end(*gone)
            room = made.room
            making = [rpc for rpc in calls if rpc.num_making]
            assert room.num_bytes == sum(rpc.num_making for rpc in calls) <= UNREAD_BYTES
            waiting = [rpc for rpc in calls if not rpc.num_making]
            most_waiting = max(most_waiting, len(waiting))
            assert sorted(map(id, waiting)) == sorted(id(rpc) for of in room._waiting.values() for rpc in of)
            assert max(Counter(rpc.session for rpc in making).values(), default=0) <= SESSION_UNREAD_BYTES // MADE_BYTES
            assert not any(room._has_room(next(iter(of))) for of in room._waiting.values())
        assert most_waiting > 20
        if calls:
            await made.end(*calls)
        made.assert_empty()

    for seed in range(5):
        asyncio.run(scenario(seed))
