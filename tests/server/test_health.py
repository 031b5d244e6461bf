"""The watchers of the health service, without a server."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from each_row import each_row
from grpc_health.v1 import health_pb2

from kvservice.auth import ClientCredentials
from kvservice.health import HealthAnswer, ask
from kvservice.server.rpc.standard import Health, note_of
from kvservice.tiers import TierStats

Status = health_pb2.HealthCheckResponse


class Watcher:
    """A caller of Watch. `heard` has the statuses that it has read; it reads only while `reads` is set."""

    def __init__(self, health: Health, service: str = "") -> None:
        self.heard: list[int] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.create_task(health.watch(health_pb2.HealthCheckRequest(service=service), self.write))

    async def write(self, answer: Any) -> None:
        await self.reads.wait()
        self.heard.append(answer.status)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_watcher_that_does_not_read_keeps_nobody_waiting() -> None:
    async def scenario() -> None:
        health = Health()
        health.set("")
        silent, other = Watcher(health), Watcher(health)
        silent.reads.clear()
        await settle()
        health.set("", reason="it drains")
        await settle()
        assert other.heard == [Status.SERVING, Status.NOT_SERVING]
        health.set("")
        silent.reads.set()
        await settle()
        assert silent.heard == [Status.SERVING], "what it missed is the latest again"
        assert other.heard == [Status.SERVING, Status.NOT_SERVING, Status.SERVING]
        silent.task.cancel()
        other.task.cancel()

    asyncio.run(scenario())


def test_a_watcher_that_leaves_takes_no_other_along() -> None:
    async def scenario() -> None:
        health = Health()
        health.set("")
        leaving, other, unknown = Watcher(health), Watcher(health), Watcher(health, "later")
        await settle()
        leaving.task.cancel()
        await settle()
        health.set("", reason="it drains")
        health.set("later")
        await settle()
        assert other.heard == [Status.SERVING, Status.NOT_SERVING]
        assert unknown.heard == [Status.SERVICE_UNKNOWN, Status.SERVING]
        other.task.cancel()
        unknown.task.cancel()

    asyncio.run(scenario())


class _Context:
    """Keeps the trailing metadata of a call."""

    metadata: tuple[tuple[str, str], ...] = ()

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.metadata = metadata


def test_a_check_says_why_and_what_is_missing() -> None:
    with each_row() as row:
        for reason in ("", "it drains"):
            for note in ("", "the tier disk is suspended"):
                with row((reason, note)):
                    health = Health(lambda note=note: note)  # type: ignore[misc]
                    health.set("", reason=reason)
                    context = _Context()
                    answer = asyncio.run(health.check(health_pb2.HealthCheckRequest(), context))
                    assert answer.status == (Status.NOT_SERVING if reason else Status.SERVING)
                    texts = {"kvservice-reason": reason, "kvservice-note": note}
                    assert dict(context.metadata) == {key: text for key, text in texts.items() if text}


def test_tiers_that_are_not_open_are_named() -> None:
    assert note_of(()) == note_of([TierStats("disk")]) == ""
    assert note_of([TierStats(state, state) for state in ("open", "opening", "suspended", "failed")]) == (
        "the tier opening is opening, the tier suspended is suspended, the tier failed has failed"
    )
    # A note of the transfers is added.
    assert note_of((), "no engine") == note_of([TierStats("disk")], "no engine") == "no engine"
    assert note_of([TierStats("disk", "failed")], "no engine") == "the tier disk has failed, no engine"
    assert note_of([TierStats("disk", "failed")], disk="/mnt/kv") == "the tier disk in /mnt/kv has failed"
    assert note_of([TierStats("disk", "opening")], faults={"disk": "full"}) == "the tier disk is opening: full"


def test_a_daemon_that_does_not_answer_is_said_to_be_late(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "kvservice.sock"))
        frozen.listen()
        answer = ask(f"unix:{tmp_path}/kvservice.sock", 0.25, ClientCredentials())
    assert answer == HealthAnswer("no answer within 0.25 s")
