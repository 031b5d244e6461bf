"""Blocks in messages: the client sends the next ones before one is answered, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from both_faces import Face
from store_daemons import OpenStore, new_namespace, store_of
from waiting import until

from kvservice.client import PutStatus
from kvservice.client.connection import BegunCall, SessionConnection
from kvservice.client.store import link
from kvservice.errors import CallTimeoutError

BLOCK_BYTES = 256 << 10
# Each message has three blocks.
NUM_BLOCKS, NUM_MESSAGES = 16, 6
FACES: list[Face] = ["blocking", "asyncio"]


class Watched:
    """A begun call that notes when it is answered or dropped. `fails`: its answer does not come in time."""

    def __init__(self, calls: Calls, begun: BegunCall, *, fails: bool) -> None:
        self._calls, self._begun, self._fails = calls, begun, fails

    async def answer(self, deadline: float | None) -> Any:
        if self._fails:
            raise CallTimeoutError("for this test")
        answer = await self._begun.answer(deadline)
        self._calls.answered += 1
        return answer

    def drop(self) -> None:
        self._calls.dropped += 1
        self._begun.drop()


class Calls:
    """The calls that are begun meanwhile, and the most that waited for an answer. That to the call with the number
    `failing`, from 0, does not come."""

    def __init__(self, failing: int | None = None) -> None:
        self.begun = self.answered = self.dropped = self.most = 0
        self._begin = SessionConnection.begin
        self._patch = patch.object(SessionConnection, "begin", self._watched(failing))

    def __enter__(self) -> Calls:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _watched(self, failing: int | None) -> Any:
        async def begin(connection: SessionConnection, *args: Any) -> Watched:
            call = Watched(self, await self._begin(connection, *args), fails=self.begun == failing)
            self.begun += 1
            self.most = max(self.most, self.begun - self.answered)
            return call

        return begin


def keys_and_blocks() -> tuple[list[bytes], Any]:
    rng = np.random.default_rng(0)
    return [rng.bytes(32) for _ in range(NUM_BLOCKS)], rng.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("in_flight_bytes", "most"), [(12 << 20, 3), (1536 << 10, 2), (1, 1)])
def test_messages_are_sent_ahead_within_limits(
    store_daemon: OpenStore, face: Face, in_flight_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvservice.client.store.moving.IN_FLIGHT_BYTES", in_flight_bytes)
    assert link.MESSAGES_IN_FLIGHT == 3

    async def scenario() -> None:
        keys, blocks = keys_and_blocks()
        out = np.zeros_like(blocks)
        async with store_of(face, store_daemon("off").address, new_namespace(BLOCK_BYTES), transport="inline") as store:
            with Calls() as puts:
                assert (await store.put(keys, blocks) == PutStatus.DONE).all()
            with Calls() as gets:
                assert (await store.get(keys, out)).all()
            for calls in (puts, gets):
                assert (calls.begun, calls.answered, calls.dropped) == (NUM_MESSAGES,) * 3
                assert calls.most == most
        np.testing.assert_array_equal(out, blocks)

    asyncio.run(scenario())


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", ["put", "get"])
def test_a_call_that_is_cut_short_drops_what_it_has_begun(store_daemon: OpenStore, face: Face, name: str) -> None:
    """Later calls get their own answers, and find the blocks of those that were answered."""

    async def scenario() -> None:
        keys, blocks = keys_and_blocks()
        out = np.zeros_like(blocks)
        async with store_of(face, store_daemon("off").address, new_namespace(BLOCK_BYTES), transport="inline") as store:
            if name == "get":
                await store.put(keys, blocks)
            with Calls(failing=1) as calls:
                done = await (store.put(keys, blocks) if name == "put" else store.get(keys, out))
            assert (calls.begun, calls.answered, calls.dropped) == (4, 1, 4)
            assert done.tolist() == [PutStatus.DONE if name == "put" else True] * 3 + [
                PutStatus.UNREACHABLE if name == "put" else False
            ] * (NUM_BLOCKS - 3)
            await asyncio.to_thread(until, lambda: store.reachable)  # the daemon has answered once more
            assert (await store.get(keys[:3], out[:3])).all()
            np.testing.assert_array_equal(out[:3], blocks[:3])
            await store.put(keys, blocks)
            assert (await store.get(keys, out)).all()
        np.testing.assert_array_equal(out, blocks)

    asyncio.run(scenario())
